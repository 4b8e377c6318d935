/* Fake versions of the Python functions that the library uses. Here, a capsule is a name and a pointer. */
#include <stddef.h>
#include <string.h>

struct capsule {
    const char *name;
    void *pointer;
};

int PyCapsule_IsValid(void *capsule, const char *name);
void *PyCapsule_GetPointer(void *capsule, const char *name);
void PyErr_Fetch(void **kind, void **value, void **traceback);
void PyErr_Restore(void *kind, void *value, void *traceback);

int PyCapsule_IsValid(void *capsule, const char *name) {
    return strcmp(((struct capsule *)capsule)->name, name) == 0;
}

void *PyCapsule_GetPointer(void *capsule, const char *name) {
    return PyCapsule_IsValid(capsule, name) ? ((struct capsule *)capsule)->pointer : NULL;
}

void PyErr_Fetch(void **kind, void **value, void **traceback) {
    *kind = *value = *traceback = NULL;
}

void PyErr_Restore(void *kind, void *value, void *traceback) {
    (void)kind;
    (void)value;
    (void)traceback;
}

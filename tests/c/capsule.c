/* gc_capsule_destructor finds Python whenever and however the host loads it. GRADCODEC_STAND_INS: folder with fake
 * Python libraries, built from tests/fakes/python. Each case runs in a child, before any other search for Python. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "child.h"

#include <dlfcn.h>

/* A capsule of the fake Python. */
struct capsule {
    const char *name;
    void *pointer;
};

static int released;

static void count(DLManagedTensor *tensor) {
    (void)tensor;
    released++;
}

static void count_versioned(DLManagedTensorVersioned *tensor) {
    (void)tensor;
    released++;
}

/* Destroys a capsule of each form and a consumed one; returns the number of released tensors. */
static int releases(void) {
    DLManagedTensor legacy;
    DLManagedTensorVersioned versioned;
    struct capsule first = {"dltensor", NULL}, second = {"dltensor_versioned", NULL};
    struct capsule consumed = {"used_dltensor", NULL};
    memset(&legacy, 0, sizeof legacy);
    memset(&versioned, 0, sizeof versioned);
    legacy.deleter = count;
    versioned.deleter = count_versioned;
    first.pointer = consumed.pointer = &legacy;
    second.pointer = &versioned;
    released = 0;
    gc_capsule_destructor(&first);
    gc_capsule_destructor(&second);
    gc_capsule_destructor(&consumed);
    return released;
}

static void load(const char *name, int mode) {
    const char *folder = getenv("GRADCODEC_STAND_INS");
    char path[4096];
    CHECK(folder != NULL);
    snprintf(path, sizeof path, "%s/%s.so", folder, name);
    if (dlopen(path, RTLD_NOW | mode) == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
}

static void without_python(void) {
    CHECK(releases() == 0);
    CHECK(strstr(gc_last_error(), "there is no Python in this process") != NULL);
}

static void for_all(void) {
    load("libpython-stand-in", RTLD_GLOBAL);
    CHECK(releases() == 2);
}

static void for_the_host_alone(void) {
    load("libpython-stand-in", RTLD_LOCAL);
    CHECK(releases() == 2);
    CHECK(releases() == 2);
}

static void for_all_after_a_call_without_python(void) {
    without_python();
    for_all();
}

static void for_the_host_alone_after_a_call_without_python(void) {
    without_python();
    for_the_host_alone();
}

static void after_another_library_of_that_name(void) {
    load("libpython-empty", RTLD_LOCAL);
    without_python();
    for_the_host_alone();
}

int main(void) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"no Python", without_python},
        {"loaded for all", for_all},
        {"loaded for the host alone", for_the_host_alone},
        {"loaded for all after a call without Python", for_all_after_a_call_without_python},
        {"loaded for the host alone after a call without Python", for_the_host_alone_after_a_call_without_python},
        {"loaded after another library of that name", after_another_library_of_that_name},
    };
    int failed = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (!returns_in_a_child(cases[i].run)) {
            fprintf(stderr, "capsule: FAILED: Python is %s\n", cases[i].name);
            failed = 1;
        }
    }
    if (!failed)
        puts("capsule: ok");
    return failed;
}

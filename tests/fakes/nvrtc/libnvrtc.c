/* An NVRTC that compiles nothing. It tests how the library finds NVRTC, calls it and uses its results. The machine code
 * or PTX is text: the source's name and the options. The environment selects versions and failures:
 *
 *   FAKE_NVRTC_VERSION   version, "12.0" if unset
 *   FAKE_NVRTC_LEVELS    supported compute capabilities, "75 80 90" if unset
 *   FAKE_NVRTC_FAILURES  "name=code name=code ...": these functions return these codes
 *   FAKE_NVRTC_SAYS      the compilation log, empty if unset
 *   FAKE_NVRTC_LOG       a file to which each compilation appends a line
 *   FAKE_NVRTC_SLEEP     duration of a compilation in milliseconds, 0 if unset
 *
 * The fake_nvrtc_...() functions at the end are for tests. -DOLD leaves out the functions added in version 11.2. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int Result;
typedef struct Program {
    char name[100];
    char code[1000];
} Program;
enum { SUCCESS, OUT_OF_MEMORY, INVALID_INPUT = 3, INVALID_PROGRAM, COMPILATION = 6 };

static atomic_int calls, programs;
static atomic_int fail_at = -1, fail_code; /* number of the call that fails, counted from fake_nvrtc_fail_call() */
static _Atomic(const char *) failed_call = "";

/* Returns the code that a test has set for this call, or SUCCESS. */
static Result failure(const char *function) {
    const char *text = getenv("FAKE_NVRTC_FAILURES");
    size_t length = strlen(function);
    for (; text && *text; text = strchr(text, ' '), text += text != NULL)
        if (!strncmp(text, function, length) && text[length] == '=')
            return (Result)strtol(text + length + 1, NULL, 10);
    if (atomic_fetch_add(&calls, 1) == atomic_load(&fail_at)) {
        atomic_store(&failed_call, function);
        return atomic_load(&fail_code);
    }
    return SUCCESS;
}

#define MAY_FAIL \
    do { \
        Result said = failure(__func__); \
        if (said) \
            return said; \
    } while (0)

/* Checks that `program` exists and is not destroyed. */
#define USABLE(program) \
    do { \
        if (!(program)) \
            return INVALID_PROGRAM; \
    } while (0)

Result nvrtcVersion(int *major, int *minor) {
    const char *text = getenv("FAKE_NVRTC_VERSION");
    MAY_FAIL;
    return sscanf(text ? text : "12.0", "%d.%d", major, minor) == 2 ? SUCCESS : INVALID_INPUT;
}

const char *nvrtcGetErrorString(Result code) {
    static const char *const names[] = {"NVRTC_SUCCESS", "NVRTC_ERROR_OUT_OF_MEMORY",
        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE", "NVRTC_ERROR_INVALID_INPUT", "NVRTC_ERROR_INVALID_PROGRAM",
        "NVRTC_ERROR_INVALID_OPTION", "NVRTC_ERROR_COMPILATION", "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE"};
    return code >= 0 && code < 8 ? names[code] : NULL; /* an error code of another version */
}

Result nvrtcCreateProgram(Program **program, const char *source, const char *name, int headers, const char *const *texts,
                          const char *const *names) {
    (void)texts, (void)names;
    MAY_FAIL;
    if (headers || !source)
        return INVALID_INPUT;
    *program = calloc(1, sizeof **program);
    if (!*program)
        return OUT_OF_MEMORY;
    snprintf((*program)->name, sizeof(*program)->name, "%s", name);
    atomic_fetch_add(&programs, 1);
    return SUCCESS;
}

Result nvrtcDestroyProgram(Program **program) {
    Result said = failure(__func__);
    USABLE(*program);
    free(*program);
    *program = NULL;
    atomic_fetch_sub(&programs, 1);
    return said;
}

Result nvrtcCompileProgram(Program *program, int options, const char *const *texts) {
    const char *path = getenv("FAKE_NVRTC_LOG"), *sleep = getenv("FAKE_NVRTC_SLEEP");
    FILE *log;
    size_t length = 0;
    MAY_FAIL;
    USABLE(program);
    length += snprintf(program->code, sizeof program->code, "%s", program->name);
    for (int k = 0; k < options && length < sizeof program->code; k++)
        length += snprintf(program->code + length, sizeof program->code - length, " %s", texts[k]);
    if (path && (log = fopen(path, "a"))) {
        fprintf(log, "%s\n", program->code);
        fclose(log);
    }
    if (sleep) {
        struct timespec time = {strtol(sleep, NULL, 10) / 1000, strtol(sleep, NULL, 10) % 1000 * 1000000};
        nanosleep(&time, NULL);
    }
    return SUCCESS;
}

static const char *says(void) { return getenv("FAKE_NVRTC_SAYS") ? getenv("FAKE_NVRTC_SAYS") : ""; }

Result nvrtcGetProgramLogSize(Program *program, size_t *bytes) {
    MAY_FAIL;
    USABLE(program);
    *bytes = strlen(says()) + 1;
    return SUCCESS;
}

Result nvrtcGetProgramLog(Program *program, char *log) {
    MAY_FAIL;
    USABLE(program);
    strcpy(log, says());
    return SUCCESS;
}

Result nvrtcGetPTXSize(Program *program, size_t *bytes) {
    MAY_FAIL;
    USABLE(program);
    *bytes = strlen("PTX: ") + strlen(program->code) + 1;
    return SUCCESS;
}

Result nvrtcGetPTX(Program *program, char *ptx) {
    MAY_FAIL;
    USABLE(program);
    sprintf(ptx, "PTX: %s", program->code);
    return SUCCESS;
}

#ifndef OLD
static int levels_of(int *levels) {
    const char *text = getenv("FAKE_NVRTC_LEVELS");
    char *end = (char *)(text ? text : "75 80 90");
    int count = 0;
    while (*end) {
        long level = strtol(end, &end, 10);
        if (levels)
            levels[count] = (int)level;
        count++;
    }
    return count;
}

Result nvrtcGetNumSupportedArchs(int *count) {
    MAY_FAIL;
    *count = levels_of(NULL);
    return SUCCESS;
}

Result nvrtcGetSupportedArchs(int *levels) {
    MAY_FAIL;
    levels_of(levels);
    return SUCCESS;
}

Result nvrtcGetCUBINSize(Program *program, size_t *bytes) {
    MAY_FAIL;
    USABLE(program);
    *bytes = strlen("machine code: ") + strlen(program->code);
    return SUCCESS;
}

Result nvrtcGetCUBIN(Program *program, char *cubin) {
    MAY_FAIL;
    USABLE(program);
    memcpy(cubin, "machine code: ", strlen("machine code: "));
    memcpy(cubin + strlen("machine code: "), program->code, strlen(program->code));
    return SUCCESS;
}
#endif

/* Makes the call after `after` more calls fail; -1: no call fails. */
void fake_nvrtc_fail_call(int after, Result code) {
    atomic_store(&fail_code, code);
    atomic_store(&failed_call, "");
    atomic_store(&calls, 0);
    atomic_store(&fail_at, after);
}
const char *fake_nvrtc_failed_call(void) { return atomic_load(&failed_call); }
/* Returns the number of programs that were created and not destroyed. */
int fake_nvrtc_programs(void) { return atomic_load(&programs); }

/* An NVRTC that compiles nothing, for tests of how ours finds it, what it asks of it and what it does with its answers. What
 * it gives as machine code or PTX is text: how it was asked, and the source's name. What it is and what goes wrong is said
 * in the environment:
 *
 *   FAKE_NVRTC_VERSION   "12.0" unless said
 *   FAKE_NVRTC_LEVELS    the compute capabilities it knows, "75 80 90" unless said
 *   FAKE_NVRTC_FAILURES  "name=code name=code ...": these functions answer that
 *   FAKE_NVRTC_SAYS      what the log is, empty unless said
 *   FAKE_NVRTC_LOG       a file to which each compilation adds a line
 *   FAKE_NVRTC_SLEEP     milliseconds that a compilation takes, 0 unless said
 *
 * fake_nvrtc_...() at the end are for the tests. -DOLD leaves out what versions before 11.2 do not have. */
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
static atomic_int fail_at = -1, fail_code; /* the call that fails, counted from when that was said */
static _Atomic(const char *) failed_call = "";

/* What a test wants a call to answer; 0 if nothing. */
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

/* A program that was made and is not destroyed. */
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
    return code >= 0 && code < 8 ? names[code] : NULL; /* an error of another version */
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

/* From now on, the call after so many fails; -1: none. */
void fake_nvrtc_fail_call(int after, Result code) {
    atomic_store(&fail_code, code);
    atomic_store(&failed_call, "");
    atomic_store(&calls, 0);
    atomic_store(&fail_at, after);
}
const char *fake_nvrtc_failed_call(void) { return atomic_load(&failed_call); }
/* Those that were made and not destroyed. */
int fake_nvrtc_programs(void) { return atomic_load(&programs); }

/* An NVRTC that compiles for the host: its machine code is a shared object, built by g++ from the source and device.h
 * (tests/fakes/cuda/). The driver without a GPU (libcuda.c) runs its kernels lane by lane. Errors are those of g++.
 * Options have no effect, except for -Dname=value.
 *
 *   FAKE_NVRTC_LOG   a file to which each compilation appends a line
 *   TMPDIR, CXX      the folder for temporary files and the compiler: /tmp and g++ by default
 *
 * -DSOURCES="..." is the folder of this file and of prelude.h, which is included before each source. -DHERE="..." is
 * the folder of the library and the precompiled prelude.h. HERE/kernels caches shared objects by a digest of the
 * source, because many processes compile the same kernels. -DFLAGS="...": flags of the precompiled prelude.h. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Program {
    char *source, *name, *log;
    char *image;
    size_t bytes;
} Program;

enum { SUCCESS, OUT_OF_MEMORY, INVALID_INPUT = 3, COMPILATION = 6 };

int nvrtcVersion(int *major, int *minor) {
    *major = 12, *minor = 9;
    return SUCCESS;
}
int nvrtcGetNumSupportedArchs(int *count) {
    *count = 2;
    return SUCCESS;
}
int nvrtcGetSupportedArchs(int *levels) {
    levels[0] = 75, levels[1] = 90;
    return SUCCESS;
}
const char *nvrtcGetErrorString(int code) { return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }

int nvrtcCreateProgram(Program **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
    (void)texts, (void)names;
    if (headers)
        return INVALID_INPUT;
    *program = calloc(1, sizeof **program);
    (*program)->source = strdup(source), (*program)->name = strdup(name);
    return SUCCESS;
}

static char *contents(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    *bytes = 0;
    if (!file)
        return strdup("");
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *text = calloc(1, *bytes + 1);
    *bytes = fread(text, 1, *bytes, file);
    fclose(file);
    return text;
}

/* Appends formatted text to `text`, which is freed; returns the result. */
__attribute__((format(printf, 2, 3))) static char *joined(char *text, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    size_t before = strlen(text), more = (size_t)vsnprintf(NULL, 0, format, arguments);
    text = realloc(text, before + more + 1);
    vsnprintf(text + before, more + 1, format, again);
    va_end(arguments);
    va_end(again);
    return text;
}

/* Returns the FNV-1a digest of a text, with a seed. */
static unsigned long long digest(const char *text, unsigned long long seed) {
    unsigned long long sum = 0xcbf29ce484222325 ^ seed;
    for (; *text; text++)
        sum = (sum ^ (unsigned char)*text) * 0x100000001b3;
    return sum;
}

static void take_image(Program *program, const char *path) {
    size_t bytes;
    char *object = contents(path, &bytes);
    uint64_t size = bytes;
    program->bytes = bytes + 16;
    program->image = malloc(program->bytes);
    memcpy(program->image, "host.so", 8);
    memcpy(program->image + 8, &size, 8);
    memcpy(program->image + 16, object, bytes);
    free(object);
}

int nvrtcCompileProgram(Program *program, int options, const char *const *texts) {
    const char *temporary = getenv("TMPDIR"), *compiler = getenv("CXX");
    char folder[1000], path[1100], kept[1100], command[6000];
    if (getenv("FAKE_NVRTC_LOG")) {
        FILE *log = fopen(getenv("FAKE_NVRTC_LOG"), "a");
        fprintf(log, "%s", program->name);
        for (int k = 0; k < options; k++)
            fprintf(log, " %s", texts[k]);
        fprintf(log, "\n");
        fclose(log);
    }
    char *text = strdup("");
    for (int k = 0; k < options; k++)
        if (!strncmp(texts[k], "-D", 2) && strchr(texts[k], '='))
            text = joined(text, "#define %.*s %s\n", (int)strcspn(texts[k] + 2, "="), texts[k] + 2, strchr(texts[k], '=') + 1);
    text = joined(text, "#line 1 \"%s\"\n%s\n", program->name, program->source);
    /* Adds a function that runs each kernel on the host. */
    const char *marker = "__launch_bounds__(256) ";
    for (const char *at = program->source; (at = strstr(at, marker)); ) {
        at += strlen(marker);
        int length = (int)strcspn(at, "(");
        text = joined(text,
                "extern \"C\" void _gc_emulate_%.*s(unsigned blocks, unsigned threads, void **arguments) {\n"
                "    const _gc_user::_gc_Args &args = *static_cast<const _gc_user::_gc_Args *>(arguments[0]);\n"
                "    launch(blocks, threads, [&] { _gc_user::%.*s(args); });\n}\n",
                length, at, length, at);
    }
    compiler = compiler && *compiler ? compiler : "g++";
    snprintf(kept, sizeof kept, HERE "/kernels/%016llx%016llx.so", digest(text, 1), digest(text, digest(compiler, 2)));
    program->log = strdup("");
    if (access(kept, R_OK) == 0) {
        take_image(program, kept);
        free(text);
        return SUCCESS;
    }
    snprintf(folder, sizeof folder, "%s/nvrtc_gcc_XXXXXX", temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder))
        return OUT_OF_MEMORY;
    snprintf(path, sizeof path, "%s/source.cpp", folder);
    FILE *file = fopen(path, "w");
    fputs(text, file);
    fclose(file);
    free(text);
    snprintf(command, sizeof command, "cd '%s' && %s " FLAGS " -I'" HERE "' -I'" SOURCES "' -include prelude.h -shared source.cpp -o image.so 2> log",
             folder, compiler);
    int failed = system(command);
    size_t bytes;
    free(program->log);
    snprintf(path, sizeof path, "%s/log", folder);
    program->log = contents(path, &bytes);
    if (!failed) {
        snprintf(path, sizeof path, "%s/image.so", folder);
        take_image(program, path);
        /* Copies to a unique name first, because other processes may read the final one. */
        snprintf(command, sizeof command, "mkdir -p '" HERE "/kernels' && cp '%s' '%s.%d' && mv '%s.%d' '%s'", path, kept,
                 (int)getpid(), kept, (int)getpid(), kept);
        failed = system(command);
    }
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) || failed ? COMPILATION : SUCCESS;
}

int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = strlen(program->log) + 1;
    return SUCCESS;
}
int nvrtcGetProgramLog(Program *program, char *log) {
    strcpy(log, program->log);
    return SUCCESS;
}
int nvrtcGetCUBINSize(Program *program, size_t *size) {
    *size = program->bytes;
    return SUCCESS;
}
int nvrtcGetCUBIN(Program *program, char *image) {
    memcpy(image, program->image, program->bytes);
    return SUCCESS;
}
int nvrtcGetPTXSize(Program *program, size_t *size) {
    (void)program, (void)size;
    return INVALID_INPUT;
}
int nvrtcGetPTX(Program *program, char *image) {
    (void)program, (void)image;
    return INVALID_INPUT;
}
int nvrtcDestroyProgram(Program **program) {
    free((*program)->source), free((*program)->name), free((*program)->log), free((*program)->image), free(*program);
    *program = NULL;
    return SUCCESS;
}

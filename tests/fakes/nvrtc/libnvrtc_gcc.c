/* An NVRTC that compiles for the host: what it gives as machine code is a shared object that g++ makes of the source, with
 * tests/fakes/cuda/device.h, whose kernels run lane by lane in the driver without a GPU (libcuda.c). What it refuses, and where,
 * are g++'s words. Of the options, -Dname=value counts.
 *
 *   FAKE_NVRTC_LOG   a file to which each compilation adds a line
 *   TMPDIR, CXX      where, and with what: /tmp and g++ unless said
 *
 * -DDEVICE="..." is the path of device.h. */
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

int nvrtcCompileProgram(Program *program, int options, const char *const *texts) {
    const char *temporary = getenv("TMPDIR"), *compiler = getenv("CXX");
    char folder[1000], path[1100], command[4000];
    if (getenv("FAKE_NVRTC_LOG")) {
        FILE *log = fopen(getenv("FAKE_NVRTC_LOG"), "a");
        fprintf(log, "%s", program->name);
        for (int k = 0; k < options; k++)
            fprintf(log, " %s", texts[k]);
        fprintf(log, "\n");
        fclose(log);
    }
    snprintf(folder, sizeof folder, "%s/nvrtc_gcc_XXXXXX", temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder))
        return OUT_OF_MEMORY;
    snprintf(path, sizeof path, "%s/source.cpp", folder);
    FILE *file = fopen(path, "w");
    for (int k = 0; k < options; k++)
        if (!strncmp(texts[k], "-D", 2) && strchr(texts[k], '='))
            fprintf(file, "#define %.*s %s\n", (int)strcspn(texts[k] + 2, "="), texts[k] + 2, strchr(texts[k], '=') + 1);
    fprintf(file, "#include <math.h>\n#define _GC_INT64 long\n#define kernel _gc_kernel\n#include \"%s\"\n#undef kernel\n#define __align__(n) __attribute__((aligned(n)))\n"
            "#define __noinline__ __attribute__((noinline))\n#line 1 \"%s\"\n%s\n",
            DEVICE, program->name, program->source);
    /* A runner for each kernel. */
    const char *marker = "__launch_bounds__(256) ";
    for (const char *at = program->source; (at = strstr(at, marker)); ) {
        at += strlen(marker);
        int length = (int)strcspn(at, "(");
        fprintf(file,
                "extern \"C\" void _gc_emulate_%.*s(unsigned blocks, unsigned threads, void **arguments) {\n"
                "    const _gc_user::_gc_Args &args = *static_cast<const _gc_user::_gc_Args *>(arguments[0]);\n"
                "    launch(blocks, threads, [&] { _gc_user::%.*s(args); });\n}\n",
                length, at, length, at);
    }
    fclose(file);
    snprintf(command, sizeof command,
             "cd '%s' && %s -std=c++17 -O1 -w -ffp-contract=off -fno-strict-aliasing -fPIC -shared source.cpp -o image.so 2> log",
             folder, compiler && *compiler ? compiler : "g++");
    int failed = system(command);
    size_t bytes;
    snprintf(path, sizeof path, "%s/log", folder);
    program->log = contents(path, &bytes);
    if (!failed) {
        snprintf(path, sizeof path, "%s/image.so", folder);
        char *object = contents(path, &bytes);
        uint64_t size = bytes;
        program->bytes = bytes + 16;
        program->image = malloc(program->bytes);
        memcpy(program->image, "host.so", 8);
        memcpy(program->image + 8, &size, 8);
        memcpy(program->image + 16, object, bytes);
        free(object);
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

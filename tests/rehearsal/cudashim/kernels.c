/* Kernels: they are registered, looked up, checked against the hardware's limits, counted, and do nothing. */
#include "shim.h"

typedef struct { int n; int arch[32]; int ptx[32]; } Module;
typedef struct { const void *host; const char *name; Module *module; long launches; int smem; dim3 grid, block; size_t dynamic; } Kernel;
static Kernel *kernels;
static size_t n_kernels, cap_kernels;
static uint32_t *hash;
static size_t cap_hash;

static size_t slot_of(const void *p) {
    size_t i = ((uintptr_t)p * 11400714819323198485ull) >> 20 & (cap_hash - 1);
    while (hash[i] && kernels[hash[i] - 1].host != p) i = (i + 1) & (cap_hash - 1);
    return i;
}
static Kernel *kernel_of(const void *p) { return cap_hash && hash[slot_of(p)] ? &kernels[hash[slot_of(p)] - 1] : 0; }
/* Which architectures a fat binary has machine code (kind 2) or PTX (kind 1) for. */
static void parse(const uint8_t *data, Module *m) {
    if (*(uint32_t *)data != 0xBA55ED50) return;
    const uint8_t *p = data + *(uint16_t *)(data + 6), *end = p + *(uint64_t *)(data + 8);
    while (p + 64 <= end && m->n < 32) {
        uint16_t kind = *(uint16_t *)p;
        uint32_t header = *(uint32_t *)(p + 4), arch = *(uint32_t *)(p + 28);
        uint64_t size = *(uint64_t *)(p + 8);
        if (!header || (kind != 1 && kind != 2)) break;
        m->arch[m->n] = (int)(arch & 0xffff); m->ptx[m->n++] = kind == 1;
        p += header + size;
    }
}
void **__cudaRegisterFatBinary(const void *wrapper) {
    Module *m = calloc(1, sizeof *m);
    const struct { uint32_t magic, version; const uint8_t *data; const void *more; } *w = wrapper;
    if (w->magic == 0x466243b1) parse(w->data, m);
    return (void **)m;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **h, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d, int *w) {
    LOCK;
    if (n_kernels == cap_kernels) kernels = realloc(kernels, (cap_kernels = cap_kernels * 2 + 4096) * sizeof *kernels);
    kernels[n_kernels++] = (Kernel){host, name, (Module *)handle, 0, 49152};
    if (n_kernels * 2 > cap_hash) {
        free(hash);
        cap_hash = cap_hash ? cap_hash * 2 : 16384;
        hash = calloc(cap_hash, sizeof *hash);
        for (size_t i = 0; i < n_kernels; i++) { size_t s = slot_of(kernels[i].host); if (!hash[s]) hash[s] = (uint32_t)i + 1; }
    } else { size_t s = slot_of(host); if (!hash[s]) hash[s] = (uint32_t)n_kernels; }
    UNLOCK;
}
static __thread struct { dim3 grid, block; size_t smem; void *stream; } pushed[8];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, void *stream) {
    if (depth < 8) { pushed[depth].grid = grid; pushed[depth].block = block; pushed[depth].smem = smem; pushed[depth].stream = stream; depth++; }
    return 0;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *smem, void *stream) {
    if (!depth) return cudashim_done(INVALID_VALUE);
    depth--;
    *grid = pushed[depth].grid; *block = pushed[depth].block; *smem = pushed[depth].smem; *(void **)stream = pushed[depth].stream;
    return OK;
}
/* Machine code runs on its own major version and newer minors; PTX on everything newer. */
static int has_image(Module *m) {
    if (!m->n) return 1; /* not understood: no statement */
    for (int i = 0; i < m->n; i++) {
        int major = m->arch[i] / 10, minor = m->arch[i] % 10;
        if (m->ptx[i] ? major * 10 + minor <= cudashim_cc_major * 10 + cudashim_cc_minor : major == cudashim_cc_major && minor <= cudashim_cc_minor) return 1;
    }
    return 0;
}
static int launch(const void *f, dim3 g, dim3 b, size_t smem, void *s) {
    int e = cudashim_enter("kernel");
    if (e) return e;
    Kernel *k = kernel_of(f);
    const char *name = k ? k->name : "an unregistered kernel";
    if (!k) cudashim_violation("launch of an unregistered kernel");
    if ((uint64_t)b.x * b.y * b.z > 1024 || b.z > 64 || !b.x || !b.y || !b.z || !g.x || !g.y || !g.z || g.x > 2147483647u || g.y > 65535 || g.z > 65535) {
        cudashim_violation("grid %u,%u,%u block %u,%u,%u of %.300s", g.x, g.y, g.z, b.x, b.y, b.z, name);
        return INVALID_CONFIGURATION;
    }
    if (k && smem > (size_t)k->smem) { cudashim_violation("%zu bytes of shared memory, %d allowed, of %.300s", smem, k->smem, name); return INVALID_VALUE; }
    if (k && !has_image(k->module)) { cudashim_violation("no machine code for sm_%d%d: %.300s", cudashim_cc_major, cudashim_cc_minor, name); return NO_KERNEL_IMAGE; }
    if ((uintptr_t)s <= 2) cudashim_note("kernel on the default stream");
    if (k) {
        LOCK;
        k->launches++;
        if ((uint64_t)g.x * g.y * g.z >= (uint64_t)k->grid.x * k->grid.y * k->grid.z) { k->grid = g; k->block = b; k->dynamic = smem; }
        UNLOCK;
    }
    int r = cudashim_on_stream("kernel", s, (Node){KERNEL});
    return r < 0 ? -r : OK;
}
/* A launch by the driver API: a loaded cubin's function, known by name only. */
int cudashim_driver_launch(const char *name, dim3 g, dim3 b, size_t smem, void *s) {
    int e = cudashim_enter("kernel");
    if (e) return e;
    char t[160];
    snprintf(t, sizeof t, "driver launch of %.120s", name);
    cudashim_note(t);
    if ((uint64_t)b.x * b.y * b.z > 1024 || !b.x || !b.y || !b.z || !g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535) {
        cudashim_violation("grid %u,%u,%u block %u,%u,%u of %.300s", g.x, g.y, g.z, b.x, b.y, b.z, name);
        return INVALID_CONFIGURATION;
    }
    int r = cudashim_on_stream("kernel", s, (Node){KERNEL});
    return r < 0 ? -r : OK;
}
int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **args, size_t smem, void *s) { return cudashim_done(launch(f, g, b, smem, s)); }
int __cudaLaunchKernel(void *f, dim3 g, dim3 b, void **args, size_t smem, void *s) { return cudashim_done(launch(f, g, b, smem, s)); }
int cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **args, size_t smem, void *s) { return cudashim_done(launch(f, g, b, smem, s)); }
typedef struct { dim3 grid, block; size_t smem; void *stream; void *attrs; unsigned n; } Config;
int cudaLaunchKernelExC(const Config *c, const void *f, void **args) { return cudashim_done(launch(f, c->grid, c->block, c->smem, c->stream)); }
int __cudaGetKernel(void **out, const void *f) { *out = (void *)f; return OK; }
int cudaGetKernel(void **out, const void *f) { *out = (void *)f; return OK; }
int cudaLaunchHostFunc(void *s, void (*fn)(void *), void *data) {
    ENTER;
    int r = cudashim_on_stream(__func__, s, (Node){HOST});
    if (!r) fn(data);
    return cudashim_done(r < 0 ? -r : OK);
}
typedef struct {
    size_t shared, constant, local; int maxThreads, regs, ptx, binary, cacheCA, maxDynamic, carveout, a, b, c, d, e, f, reserved[16];
} FuncAttributes;
int cudaFuncGetAttributes(FuncAttributes *a, const void *f) {
    ENTER;
    memset(a, 0, sizeof *a);
    Kernel *k = kernel_of(f);
    if (k && !has_image(k->module)) return cudashim_done(NO_KERNEL_IMAGE);
    a->maxThreads = 1024; a->regs = 64; a->ptx = a->binary = cudashim_cc_major * 10 + cudashim_cc_minor; a->maxDynamic = k ? k->smem : 49152;
    return OK;
}
int cudaFuncSetAttribute(const void *f, int kind, int value) {
    ENTER;
    Kernel *k = kernel_of(f);
    if (kind == 8) {
        if (value > cudashim_shared_memory()) { cudashim_violation("cudaFuncSetAttribute asks for %d bytes of shared memory", value); return cudashim_done(INVALID_VALUE); }
        if (k) k->smem = value > 49152 ? value : 49152;
    }
    return OK;
}
int cudaKernelSetAttributeForDevice(void *f, int kind, int value, int device) { ENTER; return OK; }
int cudaLibraryLoadData(void **out, ...) { ENTER; cudashim_note(__func__); *out = calloc(1, 64); return OK; }
int cudaLibraryUnload(void *l) { ENTER; return OK; }
int cudaLibraryGetKernel(void **out, void *l, const char *name) { ENTER; cudashim_note(name); *out = calloc(1, 64); return OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t smem, unsigned flags) {
    ENTER;
    int by_threads = block > 0 ? 2048 / block : 0, by_smem = smem ? (int)((size_t)(cudashim_shared_memory() + 1024) / (smem + 1024)) : 32;
    *n = by_threads < by_smem ? by_threads : by_smem;
    return OK;
}

void cudashim_report_kernels(FILE *file) {
    fprintf(file, ", \"kernels\": {");
    int written = 0;
    for (size_t i = 0; i < n_kernels; i++)
        if (kernels[i].launches) fprintf(file, "%s\"%s\": %ld", written++ ? ", " : "", kernels[i].name, kernels[i].launches);
    fprintf(file, "}");
}

void cudashim_reset_kernels(void) {
    for (size_t i = 0; i < n_kernels; i++) kernels[i].launches = 0;
}

/* libcuda.so.1: what a probe asks of the driver, entry points by name, and cubins that are launched by name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudashim_attribute(int kind);
const char *cudashim_name(void);
size_t cudashim_total(void);

static int version(void) { const char *v = getenv("CUDASHIM_DRIVER_API"); return v ? atoi(v) : 13000; }
int cuInit(unsigned flags) { cudashim_total(); return 0; }
int cuDriverGetVersion(int *v) { *v = version(); return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? 101 : 0; }
int cuDeviceGetAttribute(int *v, int kind, int device) { *v = cudashim_attribute(kind); return 0; }
int cuDeviceGetName(char *name, int n, int device) { snprintf(name, (size_t)n, "%s", cudashim_name()); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int device) { *n = cudashim_total(); return 0; }
int cuDeviceTotalMem(size_t *n, int device) { *n = cudashim_total(); return 0; }
int cuGetErrorName(int e, const char **s) { *s = e ? "CUDA_ERROR_OF_SHIM" : "CUDA_SUCCESS"; return 0; }
int cuGetErrorString(int e, const char **s) { *s = e ? "error of the shim" : "no error"; return 0; }
int cuTensorMapEncodeTiled(void *map, ...) { memset(map, 0, 128); return 0; }
int cuGetProcAddress_v2(const char *symbol, void **out, int cuda, unsigned long long flags, int *status) {
    char name[200];
    snprintf(name, sizeof name, "%s_v2", symbol);
    Dl_info me;
    dladdr((void *)cuGetProcAddress_v2, &me);
    void *self = dlopen(me.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *out = dlsym(self, name);
    if (!*out) *out = dlsym(self, symbol);
    if (status) *status = *out ? 0 : 1;
    return *out ? 0 : 500;
}
int cuGetProcAddress(const char *symbol, void **out, int cuda, unsigned long long flags) { return cuGetProcAddress_v2(symbol, out, cuda, flags, 0); }

/* Cubins that onnxruntime carries inside itself (TensorRT attention, before sm_80): loaded, never looked into. */
typedef struct { unsigned x, y, z; } dim3;
int cudashim_driver_launch(const char *name, dim3 g, dim3 b, size_t smem, void *s);
int cuModuleLoadData(void **m, const void *image) { *m = calloc(1, 16); return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = strdup(name); return 0; }
int cuFuncSetAttribute(void *f, int kind, int value) { return 0; }
int cuFuncSetCacheConfig(void *f, int config) { return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, void *s, void **a, void **e) {
    return cudashim_driver_launch(f, (dim3){gx, gy, gz}, (dim3){bx, by, bz}, smem, s);
}
int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, void *s, void **a) {
    return cudashim_driver_launch(f, (dim3){gx, gy, gz}, (dim3){bx, by, bz}, smem, s);
}
int cuLinkCreate_v2(unsigned n, void *o, void *v, void **state) { return 801; } /* not supported: no linker here */
int cuLinkDestroy(void *s) { return 0; }
int cuLinkComplete(void *s, void **image, size_t *n) { return 801; }
int cuLinkAddData_v2(void *s, ...) { return 801; }
int cuLinkAddFile_v2(void *s, ...) { return 801; }

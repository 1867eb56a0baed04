/* What the device says of itself: an invented H200 that calls itself by the stubs' own name. */
#include "shim.h"

const char *cudaGetErrorName(int e) {
    switch (e) {
    case 0: return "cudaSuccess"; case 1: return "cudaErrorInvalidValue"; case 2: return "cudaErrorMemoryAllocation";
    case 9: return "cudaErrorInvalidConfiguration"; case 209: return "cudaErrorNoKernelImageForDevice";
    case 400: return "cudaErrorInvalidResourceHandle"; case 700: return "cudaErrorIllegalAddress";
    case 719: return "cudaErrorLaunchFailure"; case 900: return "cudaErrorStreamCaptureUnsupported";
    case 901: return "cudaErrorStreamCaptureInvalidated"; default: return "cudaErrorOfShim";
    }
}
const char *cudaGetErrorString(int e) {
    switch (e) {
    case 0: return "no error"; case 1: return "invalid argument"; case 2: return "out of memory";
    case 9: return "invalid configuration argument"; case 209: return "no kernel image is available for execution on the device";
    case 400: return "invalid resource handle"; case 700: return "an illegal memory access was encountered";
    case 719: return "unspecified launch failure"; case 900: return "operation not permitted when stream is capturing";
    case 901: return "operation failed due to a previous error during capture"; default: return "error of the shim";
    }
}

typedef struct {
    char name[256]; char uuid[16]; char luid[8]; unsigned luidDeviceNodeMask; size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize; size_t memPitch; int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    size_t totalConstMem; int major, minor; size_t textureAlignment, texturePitchAlignment;
    int multiProcessorCount, integrated, canMapHostMemory, maxTexture1D, maxTexture1DMipmap, maxTexture2D[2],
        maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3], maxTexture3DAlt[3],
        maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2], maxSurface1D,
        maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2], maxSurface2DLayered[3], maxSurfaceCubemap,
        maxSurfaceCubemapLayered[2];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount,
        unifiedAddressing, memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor,
        streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported,
        pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem,
        cooperativeLaunch;
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor,
        accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported,
        timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
    unsigned gpuDirectRDMAFlushWritesOptions; int gpuDirectRDMAWritesOrdering; unsigned memoryPoolSupportedHandleTypes;
    int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers, deviceNumaConfig,
        deviceNumaId, mpsEnabled, hostNumaId;
    unsigned gpuPciDeviceID, gpuPciSubsystemID; int hostNumaMultinodeIpcSupported, reserved[56];
} Prop;

/* Most shared memory that a block may ask for, by compute capability (CUDA C++ programming guide, table 27). */
int cudashim_shared_memory(void) {
    switch (cudashim_cc_major * 10 + cudashim_cc_minor) {
    case 75: return 65536;
    case 80: return 166912;
    case 90: case 100: return 232448;
    default: return 101376;
    }
}

int cudashim_attribute(int kind) { /* the numbering of cudaDeviceAttr and CUdevice_attribute is the same */
    switch (kind) {
    case 1: case 2: case 3: return 1024; case 4: return 64; case 5: return 2147483647; case 6: case 7: return 65535;
    case 8: return 49152; case 9: return 65536; case 10: return 32; case 11: return 2147483647; case 12: return 65536;
    case 13: return 1980000; case 14: return 512; case 15: return 1; case 16: return 132; case 19: return 1;
    case 31: case 32: return 1; case 36: return 3201000; case 37: return 6144; case 38: return 52428800;
    case 39: return 2048; case 40: return 3; case 41: return 1; case 51: return 32; case 75: return cudashim_cc_major;
    case 76: return cudashim_cc_minor; case 78: case 79: case 80: return 1; case 81: return cudashim_shared_memory() + 1024; case 82: return 65536;
    case 83: return 1; case 87: return 2; case 89: case 90: case 91: case 95: return 1; case 97: return cudashim_shared_memory();
    case 99: return 1; case 106: return 32; case 108: return 32 << 20; case 109: return 128 << 20; case 111: return 1024;
    case 115: case 120: return 1; default: return 0;
    }
}
const char *cudashim_name(void) { return "CUDASHIM-NO-GPU"; }
size_t cudashim_total(void) { cudashim_setup(); return cudashim_total_bytes; }
int cudaGetDeviceProperties(Prop *p, int device) {
    ENTER;
    if (device) return cudashim_done(101);
    memset(p, 0, sizeof *p);
    snprintf(p->name, 256, "%s", cudashim_name());
    p->totalGlobalMem = cudashim_total_bytes; p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32;
    p->memPitch = 2147483647; p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64; p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536; p->major = cudashim_cc_major; p->minor = cudashim_cc_minor; p->textureAlignment = 512;
    p->texturePitchAlignment = 32; p->multiProcessorCount = 132; p->canMapHostMemory = 1; p->concurrentKernels = 1;
    p->ECCEnabled = 1; p->asyncEngineCount = 3; p->unifiedAddressing = 1; p->memoryBusWidth = 6144;
    p->l2CacheSize = 52428800; p->persistingL2CacheMaxSize = 32 << 20; p->maxThreadsPerMultiProcessor = 2048;
    p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->sharedMemPerMultiprocessor = (size_t)cudashim_shared_memory() + 1024; p->regsPerMultiprocessor = 65536; p->managedMemory = 1;
    p->concurrentManagedAccess = p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = (size_t)cudashim_shared_memory(); p->maxBlocksPerMultiProcessor = 32; p->accessPolicyMaxWindowSize = 128 << 20;
    p->reservedSharedMemPerBlock = 1024; p->hostRegisterSupported = 1; p->memoryPoolsSupported = 1; p->clusterLaunch = 1;
    return OK;
}
int cudaDeviceGetAttribute(int *v, int kind, int device) { ENTER; if (device) return cudashim_done(101); *v = cudashim_attribute(kind); return OK; }
int cudaGetDeviceCount(int *n) { ENTER; *n = 1; return OK; }
int cudaGetDevice(int *d) { ENTER; *d = 0; return OK; }
int cudaSetDevice(int d) { ENTER; return cudashim_done(d ? 101 : OK); }
int cudaDriverGetVersion(int *v) { ENTER; *v = 13000; return OK; }
int cudaRuntimeGetVersion(int *v) { ENTER; *v = 13000; return OK; }
int cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version, unsigned long long flags, int *status) {
    ENTER;
    void *lib = dlopen("libcuda.so.1", RTLD_NOW);
    *out = lib ? dlsym(lib, symbol) : 0;
    if (status) *status = *out ? 0 : 1;
    return OK;
}


// The driver, libcuda.so.1, as far as Triton and torch ask it. Its answers are those of the pretended runtime.
// Other functions of the driver are generated, and return success.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

static const CUcontext CONTEXT = (CUcontext)0x77;
static const CUmodule MODULE = (CUmodule)0x88;

static void *runtime(const char *name) { return dlsym(RTLD_DEFAULT, name); }

CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *number) { return ((int (*)(int *))runtime("cudaGetDeviceCount"))(number); }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return ((int (*)(int *))runtime("cudaGetDevice"))(device); }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return ((int (*)(int *, int, int))runtime("cudaDeviceGetAttribute"))(value, attribute, device);
}
CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    return strncpy(name, "NVIDIA H200", length), CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)value = pointer;
    else
        *(int *)value = 0;
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = MODULE, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)strdup(name), CUDA_SUCCESS;  // a function is its name
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 40 : 0;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = 1024;
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction function, const CUlaunchConfig *config) {
    return *number = 8, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "error of the pretended GPU", CUDA_SUCCESS; }
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *found) {
    *function = runtime(name);
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

static CUresult launched(CUfunction function, CUstream stream) {
    ((void (*)(const char *, CUstream))runtime("cuda_sim_kernel"))((const char *)function, stream);
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    return launched(function, config->hStream);
}
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                        unsigned shared, CUstream stream, void **arguments, void **extra) {
    return launched(function, stream);
}

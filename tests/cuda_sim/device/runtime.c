// CUDA runtime of a GPU that does not exist. Memory of the device is memory of the host that nobody has written.
//
// Copies and fills happen at once, kernels do nothing, and streams and events are numbers. Every launch, copy, wait,
// synchronization and allocation is recorded. Other functions of the runtime are generated, and return success.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "record.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device = 0;

static long setting(const char *name, long usual) {
    const char *value = getenv(name);
    return value ? atol(value) : usual;
}

static size_t device_bytes(void) { return (size_t)setting("CUDA_SIM_GIB", 141) << 30; }

// The record.

static FILE *file = NULL;

// Begin a record in a file, or end it: NULL.
void cuda_sim_record(const char *path) {
    pthread_mutex_lock(&lock);
    if (file) fclose(file);
    file = path ? fopen(path, "w") : NULL;
    pthread_mutex_unlock(&lock);
}

void record(const char *format, ...) {
    if (!file) return;
    va_list fields;
    va_start(fields, format);
    pthread_mutex_lock(&lock);
    if (file) {
        fprintf(file, "thread=%d ", gettid());
        vfprintf(file, format, fields);
        fputc('\n', file);
    }
    pthread_mutex_unlock(&lock);
    va_end(fields);
}

// Add a point with a name to the record.
void cuda_sim_mark(const char *name) { record("point name=%s", name); }

// Names of kernels by the address of their function on the host, in a table with open addresses.

#define NUM_KERNELS (1 << 21)
static const void *kernel_functions[NUM_KERNELS];
static const char *kernel_names[NUM_KERNELS];

static uint64_t kernel_slot(const void *function) {
    uint64_t slot = ((uint64_t)function * 11400714819323198485ull) >> 43;
    while (kernel_functions[slot] && kernel_functions[slot] != function) slot = (slot + 1) & (NUM_KERNELS - 1);
    return slot;
}

void __cudaRegisterFunction(void **module, const char *function, char *device_function, const char *name, int limit,
                            void *a, void *b, void *c, void *d, int *e) {
    uint64_t slot = kernel_slot(function);
    kernel_functions[slot] = function;
    kernel_names[slot] = name;
}
void **__cudaRegisterFatBinary(void *binary) {
    static void *module;
    return &module;
}
void __cudaRegisterFatBinaryEnd(void **module) {}
void __cudaUnregisterFatBinary(void **module) {}
void __cudaRegisterVar(void **module, char *variable, char *address, const char *name, int a, size_t b, int c, int d) {}
char __cudaInitModule(void **module) { return 1; }

static const char *kernel_name(const void *function) {
    const char *name = kernel_names[kernel_slot(function)];
    return name ? name : "unknown";
}

// Record a kernel of the driver, which knows it by name.
void cuda_sim_kernel(const char *name, cudaStream_t stream) { record("kernel stream=%lx name=%s", (long)stream, name); }

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    record("kernel stream=%lx grid=%u,%u,%u name=%s", (long)stream, grid.x, grid.y, grid.z, kernel_name(function));
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    dim3 grid = config->gridDim;
    return cudaLaunchKernel(function, grid, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}
// Of CUDA 13, whose compiler looks a kernel up before the launch.
cudaError_t __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, cudaSuccess; }
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->binaryVersion = found->ptxVersion = setting("CUDA_SIM_CAPABILITY", 90);
    found->numRegs = 32;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

// Memory: each allocation of the device, and each pinned one of the host.

enum { FREE, PINNED, DEVICE };
struct Memory {
    char *begin;
    size_t size;
    int kind, device;
    int is_registered;  // memory of the caller, which only became pinned
};
#define NUM_MEMORIES 100000
static struct Memory memories[NUM_MEMORIES];
static int num_memories = 0;
static size_t allocated[64];

static struct Memory *find(const void *pointer) {
    for (int i = 0; i < num_memories; i++) {
        struct Memory *memory = &memories[i];
        if (memory->kind && (char *)pointer >= memory->begin && (char *)pointer < memory->begin + memory->size)
            return memory;
    }
    return NULL;
}

static void add(void *begin, size_t size, int kind, int is_registered) {
    pthread_mutex_lock(&lock);
    int free = 0;
    for (int i = 0; i < num_memories; i++) {  // of memory that its owner gave back without a word to CUDA
        struct Memory *old = &memories[i];
        if (old->is_registered && old->begin < (char *)begin + size && (char *)begin < old->begin + old->size)
            old->kind = FREE;
    }
    while (free < num_memories && memories[free].kind) free++;
    if (free == NUM_MEMORIES) abort();
    if (free == num_memories) num_memories++;
    memories[free] = (struct Memory){begin, size, kind, current_device, is_registered};
    pthread_mutex_unlock(&lock);
}

static void *pages(size_t size) {  // which no memory backs until they are written
    void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

static void release(void *pointer) {
    pthread_mutex_lock(&lock);
    struct Memory *memory = pointer ? find(pointer) : NULL;
    if (memory) {
        if (memory->kind == DEVICE) allocated[memory->device] -= memory->size;
        if (!memory->is_registered) munmap(memory->begin, memory->size);
        memory->kind = FREE;
    }
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    if (allocated[current_device] + size > device_bytes() || !(*pointer = pages(size)))
        return *pointer = NULL, cudaErrorMemoryAllocation;
    allocated[current_device] += size;
    add(*pointer, size, DEVICE, 0);
    record("malloc bytes=%zu", size);
    return cudaSuccess;
}
cudaError_t cudaFree(void *pointer) {
    if (pointer) record("free");
    release(pointer);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    *pointer = pages(size);
    add(*pointer, size, PINNED, 0);
    record("pin bytes=%zu", size);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *pointer) {
    release(pointer);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    add(pointer, size, PINNED, 1);
    record("pin bytes=%zu", size);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) {
    release(pointer);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = device_bytes();
    *free = *total - allocated[current_device];
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    struct Memory *memory = find(pointer);
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    if (!memory) return cudaSuccess;
    found->type = memory->kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->device = memory->device;
    found->devicePointer = (void *)pointer;
    found->hostPointer = memory->kind == PINNED ? (void *)pointer : NULL;
    return cudaSuccess;
}

// Copies. What the device never wrote is zero already, so that no page of a large tensor is touched.

#define LARGEST_COPY (1 << 24)

static const char *side(const void *pointer) {
    struct Memory *memory = find(pointer);
    if (!memory) return "pageable";
    return memory->kind == PINNED ? "pinned" : "device";
}

static cudaError_t copied(void *to, const void *from, size_t size, const char *way, cudaStream_t stream) {
    record("copy stream=%lx bytes=%zu from=%s to=%s way=%s", (long)stream, size, side(from), side(to), way);
    if (size <= LARGEST_COPY) memmove(to, from, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return copied(to, from, size, "sync", 0);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copied(to, from, size, "async", stream);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
    return copied(to, from, size, "async", stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    record("copy stream=%lx bytes=%zu from=%s to=%s way=async", (long)stream, width * height, side(from), side(to));
    for (size_t row = 0; row < height && width * height <= LARGEST_COPY; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
    record("fill stream=%lx bytes=%zu", (long)stream, size);
    if (size <= LARGEST_COPY) memset(pointer, value, size);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *pointer, int value, size_t size) { return cudaMemsetAsync(pointer, value, size, 0); }

// Streams and events. The number of a stream of high priority has a bit of its own. The lowest bits are 0, as those of
// an address, since torch keeps the kind of a stream there.

#define HIGH_PRIORITY 0x10000000l

static long num_streams = 0x1000, num_events = 0x100000;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    long number = __sync_add_and_fetch(&num_streams, 16);
    *stream = (cudaStream_t)(priority < 0 ? number | HIGH_PRIORITY : number);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

volatile int waits_for_lost = 0;
void cuda_sim_lose(void) { waits_for_lost = 1; }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    record("sync of=stream stream=%lx", (long)stream);
    while (waits_for_lost) usleep(1000);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    record("sync of=device");
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
#if CUDART_VERSION < 13000
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *number) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *number) {
#endif
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (number) *number = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    record("wait stream=%lx event=%lx", (long)stream, (long)event);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = (cudaEvent_t)__sync_add_and_fetch(&num_events, 1);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    record("mark stream=%lx event=%lx", (long)stream, (long)event);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    record("sync of=event event=%lx", (long)event);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    *ms = 1;
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    function(argument);
    return cudaSuccess;
}

// Devices.

cudaError_t cudaGetDeviceCount(int *number) {
    *number = setting("CUDA_SIM_GPUS", 8);
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 1;
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t error) { return "error of the pretended GPU"; }
const char *cudaGetErrorName(cudaError_t error) { return "error of the pretended GPU"; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = properties.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = properties.regsPerMultiprocessor; break;
        case cudaDevAttrMaxBlockDimX: *value = properties.maxThreadsDim[0]; break;
        case cudaDevAttrMaxBlockDimY: *value = properties.maxThreadsDim[1]; break;
        case cudaDevAttrMaxBlockDimZ: *value = properties.maxThreadsDim[2]; break;
        case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: *value = properties.maxGridSize[1]; break;
        case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[2]; break;
        case cudaDevAttrWarpSize: *value = properties.warpSize; break;
        case cudaDevAttrClockRate: *value = 1980000; break;  // in kHz
        case cudaDevAttrMemoryClockRate: *value = 3201000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = properties.memoryBusWidth; break;
        case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
        default: *value = 1;
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {  // of an H200, unless the test says more
    const char *name = getenv("CUDA_SIM_NAME");
    long capability = setting("CUDA_SIM_CAPABILITY", 90);
    memset(found, 0, sizeof *found);
    strncpy(found->name, name ? name : "NVIDIA H200", sizeof found->name - 1);
    found->major = capability / 10;
    found->minor = capability % 10;
    found->totalGlobalMem = device_bytes();
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = capability >= 90 ? 232448 : capability == 80 ? 166912 : 101376;
    found->sharedMemPerMultiprocessor = found->sharedMemPerBlockOptin + 1024;
    found->l2CacheSize = 50 << 20;
    found->maxGridSize[0] = INT32_MAX;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->memoryBusWidth = 6144;
    found->unifiedAddressing = found->concurrentKernels = 1;
    found->asyncEngineCount = 3;
    found->textureAlignment = 512;
    found->pciBusID = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

// Functions of the driver that the runtime hands out.

int cuTensorMapEncodeTiled(void) { return 0; }

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPoint(name, function, flags, found);
}

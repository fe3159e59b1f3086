// cuBLAS, cuDNN and NCCL of the pretended GPU. Products are recorded with their sizes, collectives with their
// communicator; nothing computes, and nothing waits for another rank. Other functions are generated, and return success.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "record.h"

// cuBLAS. Its headers are in no wheel that torch needs; statuses are numbers, 0 is success.

static __thread cudaStream_t blas_stream = 0;

int cublasCreate_v2(void **handle) { return *handle = malloc(64), 0; }
int cublasDestroy_v2(void *handle) { return free(handle), 0; }
int cublasLtCreate(void **handle) { return *handle = malloc(64), 0; }
int cublasLtDestroy(void *handle) { return free(handle), 0; }
int cublasGetVersion_v2(void *handle, int *version) { return *version = 120804, 0; }
size_t cublasLtGetVersion(void) { return 120804; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
int cublasSetStream_v2(void *handle, cudaStream_t stream) { return blas_stream = stream, 0; }
int cublasGetStream_v2(void *handle, cudaStream_t *stream) { return *stream = blas_stream, 0; }
const char *cublasGetStatusString(int status) { return "status of the pretended GPU"; }
const char *cublasLtGetStatusString(int status) { return "status of the pretended GPU"; }

static int product(const char *name, int m, int n, int k) {
    record("kernel stream=%lx m=%d n=%d k=%d name=%s", (long)blas_stream, m, n, k, name);
    return 0;
}
int cublasGemmEx(void *handle, int transpose_a, int transpose_b, int m, int n, int k) {
    return product("cublasGemmEx", m, n, k);
}
int cublasSgemm_v2(void *handle, int transpose_a, int transpose_b, int m, int n, int k) {
    return product("cublasSgemm", m, n, k);
}
int cublasGemmStridedBatchedEx(void *handle, int transpose_a, int transpose_b, int m, int n, int k) {
    return product("cublasGemmStridedBatchedEx", m, n, k);
}
int cublasSgemmStridedBatched(void *handle, int transpose_a, int transpose_b, int m, int n, int k) {
    return product("cublasSgemmStridedBatched", m, n, k);
}

#define HEURISTIC_BYTES 96  // sizeof(cublasLtMatmulHeuristicResult_t)
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *number) {
    memset(results, 0, HEURISTIC_BYTES);
    *number = 1;
    return 0;
}
int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *A, void *a, const void *B, void *b,
                   const void *beta, const void *C, void *c, void *D, void *d, const void *algorithm, void *workspace,
                   size_t size, cudaStream_t stream) {
    record("kernel stream=%lx name=cublasLtMatmul", (long)stream);
    return 0;
}

// cuDNN.

size_t cudnnGetVersion(void) { return 91002; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
int cudnnCreate(void **handle) { return *handle = malloc(64), 0; }
int cudnnBackendCreateDescriptor(int kind, void **descriptor) { return *descriptor = NULL, 3000; }  // not supported
void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
const char *cudnnGetErrorString(int status) { return "status of the pretended GPU"; }

// NCCL. A communicator is a number that all of its ranks compute alike, from the id that the first one drew.

struct Communicator {
    uint64_t id;
    int rank, size, num_splits;
};
static struct Communicator *of(ncclComm_t communicator) { return (struct Communicator *)communicator; }

static ncclResult_t open(ncclComm_t *opened, uint64_t id, int size, int rank) {
    struct Communicator *made = calloc(1, sizeof *made);
    *made = (struct Communicator){id, rank, size, 0};
    *opened = (ncclComm_t)made;
    record("open comm=%lx size=%d rank=%d", id, size, rank);
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *found) {
    static uint64_t number = 0;
    uint64_t id = ((uint64_t)getpid() << 32) + __sync_add_and_fetch(&number, 1);
    memset(found, 0, sizeof *found);
    memcpy(found, &id, sizeof id);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *opened, int size, ncclUniqueId unique, int rank) {
    uint64_t id;
    memcpy(&id, &unique, sizeof id);
    return open(opened, id, size, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *opened, int size, ncclUniqueId unique, int rank, ncclConfig_t *config) {
    return ncclCommInitRank(opened, size, unique, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *opened, int size, int rank, int number, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
    return ncclCommInitRank(opened, size, ids[0], rank);
}
static __thread int size_of_split = 0;
void cuda_sim_split(int size) { size_of_split = size; }  // ranks of the next communicator that is split from another

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *opened, ncclConfig_t *config) {
    struct Communicator *from = of(parent);
    from->num_splits++;
    record("split comm=%lx number=%d", from->id, from->num_splits);
    if (color == NCCL_SPLIT_NOCOLOR) return *opened = NULL, ncclSuccess;
    uint64_t id = (from->id * 1000003 + from->num_splits) * 1000003 + color;
    return open(opened, id, size_of_split, key);
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) { return free(communicator), ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
    record("abort comm=%lx", of(communicator)->id);
    waits_for_lost = 0;
    return ncclCommDestroy(communicator);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error) { return *error = 0, ncclSuccess; }
ncclResult_t ncclCommCount(ncclComm_t communicator, int *size) { return *size = of(communicator)->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int *rank) { return *rank = of(communicator)->rank, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t result) { return "result of the pretended GPU"; }
const char *ncclGetLastError(ncclComm_t communicator) { return ""; }

ncclResult_t ncclGroupStart(void) { return record("group_begin"), ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return record("group_end"), ncclSuccess; }

static ncclResult_t called(const char *name, ncclComm_t communicator, size_t count, ncclDataType_t type, int operation,
                           int peer, cudaStream_t stream) {
    record("nccl name=%s comm=%lx count=%zu type=%d operation=%d peer=%d stream=%lx", name, of(communicator)->id, count,
           type, operation, peer, (long)stream);
    return ncclSuccess;
}
#define NONE (-1)  // no operation, or no peer

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t communicator, cudaStream_t stream) {
    return called("all_reduce", communicator, count, type, operation, NONE, stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t communicator, cudaStream_t stream) {
    return called("reduce_scatter", communicator, count, type, operation, NONE, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
    return called("all_gather", communicator, count, type, NONE, NONE, stream);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
    return called("reduce", communicator, count, type, operation, root, stream);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
    return called("broadcast", communicator, count, type, NONE, root, stream);
}
ncclResult_t ncclBcast(void *at, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
    return called("broadcast", communicator, count, type, NONE, root, stream);
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
    return called("send", communicator, count, type, NONE, peer, stream);
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
    return called("receive", communicator, count, type, NONE, peer, stream);
}

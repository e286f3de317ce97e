// A GPU that computes nothing: the parts of the CUDA runtime, of cuBLAS and of the driver that PyTorch and Triton ask for, loaded
// before the real ones. Its memory is the host's, copies are made when they are issued, kernels and products are left undone.
// All else is as on a card: PyTorch picks the operators that it has for one, Inductor and Triton compile for sm_90, and the
// caching allocator counts.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#define TOTAL ((size_t)80 << 30)
static size_t used;

// the device
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *d) { *d = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return cudaSuccess; }
static __thread cudaError_t last;  // of a call that was refused: PyTorch raises it behind the next kernel, unless it is asked for
static cudaError_t refused(cudaError_t e) { return last = e; }
cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->major = 9; p->minor = 0; p->totalGlobalMem = TOTAL; p->multiProcessorCount = 132;
  p->maxThreadsPerMultiProcessor = 2048; p->maxThreadsPerBlock = 1024; p->warpSize = 32;
  p->regsPerBlock = 65536; p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 52428800; p->memoryBusWidth = 5120; p->unifiedAddressing = 1; p->canMapHostMemory = 1;
  p->asyncEngineCount = 3; p->concurrentKernels = 1;
  for (int i = 0; i < 3; i++) { p->maxThreadsDim[i] = i < 2 ? 1024 : 64; p->maxGridSize[i] = i ? 65535 : 2147483647; }
  p->maxBlocksPerMultiProcessor = 32;
  return cudaSuccess;
}
static int attribute(int a) {
  switch (a) {
  case 1: return 1024; case 8: return 49152; case 10: return 32; case 12: return 65536; case 13: return 1980000;
  case 16: return 132; case 36: return 2619000; case 37: return 5120; case 38: return 52428800; case 39: return 2048;
  case 41: return 1; case 75: return 9; case 76: return 0; case 81: return 233472; case 82: return 65536; case 97: return 232448; case 106: return 32;
  default: return 1; }
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute(a); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:00:00.0"); return cudaSuccess; }

// memory, of which the driver knows what it is
static struct range { char *begin; size_t bytes; enum cudaMemoryType type; } ranges[1 << 16];
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int find(const void *p) {
  for (int i = 0; i < count; i++) if ((size_t)((char *)p - ranges[i].begin) < ranges[i].bytes) return i;
  return -1;
}
static cudaError_t know(void *p, size_t n, enum cudaMemoryType type) {
  pthread_mutex_lock(&lock);
  int is_new = find(p) < 0;
  if (is_new) ranges[count++] = (struct range){p, n, type};
  if (is_new && type == cudaMemoryTypeDevice) used += n;
  pthread_mutex_unlock(&lock);
  return is_new ? cudaSuccess : refused(cudaErrorHostMemoryAlreadyRegistered);
}
static cudaError_t forget(void *p) {
  pthread_mutex_lock(&lock);
  int i = find(p), is_known = i >= 0 && ranges[i].begin == p;
  if (is_known && ranges[i].type == cudaMemoryTypeDevice) used -= ranges[i].bytes;
  if (is_known) ranges[i] = ranges[--count];
  pthread_mutex_unlock(&lock);
  return is_known ? cudaSuccess : refused(cudaErrorHostMemoryNotRegistered);
}
static cudaError_t take(void **p, size_t n, size_t alignment, enum cudaMemoryType type) {
  *p = type == cudaMemoryTypeDevice && used + n > TOTAL ? 0 : aligned_alloc(alignment, (n + alignment - 1) & -alignment);
  return *p ? know(*p, n, type) : refused(cudaErrorMemoryAllocation);
}
static cudaError_t give(void *p) { if (p && forget(p) == cudaSuccess) free(p); return cudaSuccess; }
cudaError_t cudaMalloc(void **p, size_t n) { return take(p, n, 512, cudaMemoryTypeDevice); }
cudaError_t cudaFree(void *p) { return give(p); }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *f = TOTAL - used; *t = TOTAL; return cudaSuccess; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { return take(p, n, 4096, cudaMemoryTypeHost); }
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) { return know(p, n, cudaMemoryTypeHost); }
cudaError_t cudaHostUnregister(void *p) { return forget(p); }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  pthread_mutex_lock(&lock);
  int i = find(p);
  a->type = i < 0 ? cudaMemoryTypeUnregistered : ranges[i].type;
  pthread_mutex_unlock(&lock);
  if (i >= 0) a->devicePointer = (void *)p;
  if (a->type == cudaMemoryTypeHost) a->hostPointer = (void *)p;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { memmove(d, s, n); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t q) { memmove(d, s, n); return cudaSuccess; }
cudaError_t cudaMemset(void *d, int v, size_t n) { memset(d, v, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t q) { memset(d, v, n); return cudaSuccess; }

// streams and events
static unsigned long next_stream = 0x1000;
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = (cudaStream_t)(next_stream += 16); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = calloc(1, sizeof(struct timespec)); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  struct timespec *x = (struct timespec *)a, *y = (struct timespec *)b;
  *ms = (y->tv_sec - x->tv_sec) * 1e3 + (y->tv_nsec - x->tv_nsec) * 1e-6; return cudaSuccess; }

// kernels
static __thread struct { dim3 g, b; size_t m; void *s; } launch;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) { launch.g = g; launch.b = b; launch.m = m; launch.s = s; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) { *g = launch.g; *b = launch.b; *m = launch.m; *(void **)s = launch.s; return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) { memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->binaryVersion = a->ptxVersion = 90; return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned fl) { *n = 2; return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **p, const void *s) { static char symbols[1 << 16]; *p = symbols; return cudaSuccess; }
cudaError_t cudaMemcpyToSymbol(const void *s, const void *p, size_t n, size_t o, enum cudaMemcpyKind k) { return cudaSuccess; }
void **__cudaRegisterFatBinary(void *f) { static void *h; return &h; }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **h) { return 1; }
int nothing() { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *n, void **p, unsigned v, unsigned long long f, enum cudaDriverEntryPointQueryResult *r) {
  *p = (void *)nothing; if (r) *r = cudaDriverEntryPointSuccess; return cudaSuccess; }

// cuBLAS
#define NONE(name) __asm__(".globl " #name "\n.type " #name ",@function\n.set " #name ", nothing");
int cublasCreate_v2(void **h) { *h = malloc(16); return 0; }
NONE(cublasDestroy_v2) NONE(cublasSetStream_v2) NONE(cublasSetWorkspace_v2) NONE(cublasSetMathMode) NONE(cublasSetPointerMode_v2)
int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
NONE(cublasSgemm_v2) NONE(cublasSgemmEx) NONE(cublasGemmEx) NONE(cublasGemmStridedBatchedEx) NONE(cublasSgemmStridedBatched) NONE(cublasSgemv_v2) NONE(cublasSdot_v2) NONE(cublasDotEx)
NONE(cublasLtMatmul) NONE(cublasLtMatmulDescSetAttribute) NONE(cublasLtMatmulPreferenceSetAttribute) NONE(cublasLtMatrixLayoutSetAttribute)
NONE(cublasLtMatmulDescDestroy) NONE(cublasLtMatmulPreferenceDestroy) NONE(cublasLtMatrixLayoutDestroy)
int cublasLtMatmulDescCreate(void **p) { *p = calloc(1, 64); return 0; }
int cublasLtMatmulPreferenceCreate(void **p) { *p = calloc(1, 64); return 0; }
int cublasLtMatrixLayoutCreate(void **p) { *p = calloc(1, 64); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *r, int *found) { memset(r, 0, 96); *found = 1; return 0; }

// the driver, which Triton asks
NONE(cuInit) NONE(cuCtxSetCurrent) NONE(cuCtxSetLimit) NONE(cuFuncSetAttribute) NONE(cuFuncSetCacheConfig)
NONE(cuLaunchKernel) NONE(cuLaunchKernelEx) NONE(cuLaunchCooperativeKernel) NONE(cuModuleUnload) NONE(cuTensorMapEncodeTiled)
NONE(cuLinkAddData_v2) NONE(cuLinkComplete) NONE(cuLinkCreate_v2)
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)16; return 0; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 1 << 20; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = 0; return 0; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = attribute(a); return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)16; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = a == 0 ? 1024 : a == 4 ? 32 : 0; return 0; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "fake"; return 0; }
CUresult cuGetErrorName(CUresult e, const char **s) { *s = "fake"; return 0; }
CUresult cuModuleLoad(CUmodule *m, const char *p) { *m = (CUmodule)16; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *p) { *m = (CUmodule)16; return 0; }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *p, unsigned n, CUjit_option *o, void **v) { *m = (CUmodule)16; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = (CUfunction)16; return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return 0; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int b, size_t m) { *n = 2; return 0; }
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)v = p; return 0; }
CUresult cuGetProcAddress_v2(const char *n, void **p, int v, cuuint64_t f, CUdriverProcAddressQueryResult *r) { *p = (void *)nothing; return 0; }

// Emulates cuBLAS and cuBLASLt: the matrix products. Each product records one event with its floating-point operations,
// 2mnk, and the bytes of its three matrices; a real product may launch several kernels. There is one algorithm for all
// products, without a workspace.
#include "record.h"

typedef struct {
  unsigned short bits;
} __half, __nv_bfloat16; // used in cuBLAS's declarations; see Makefile
#include <cublasLt.h>
#include <cublas_v2.h>
#include <stdlib.h>
#include <string.h>

struct cublasContext {
  cudaStream_t stream;
  cublasMath_t math;
  cublasPointerMode_t pointers;
};

static size_t element_bytes(cudaDataType type) {
  switch (type) {
  case CUDA_R_64F:
  case CUDA_C_32F: return 8;
  case CUDA_C_64F: return 16;
  case CUDA_R_16F:
  case CUDA_R_16BF: return 2;
  case CUDA_R_8I:
  case CUDA_R_8F_E4M3:
  case CUDA_R_8F_E5M2: return 1;
  default: return 4;
  }
}

typedef struct {
  const char *name;
  double rows, columns, inner, batch;
  cudaDataType in, out;
  cudaStream_t stream;
} Product;

static cublasStatus_t multiply(Product p) {
  count_launch();
  double read = p.inner * (p.rows + p.columns) * element_bytes(p.in);
  double written = p.rows * p.columns * element_bytes(p.out);
  record((Event){.kind = GEMM,
                 .name = p.name,
                 .stream = (uint64_t)p.stream,
                 .flops = 2 * p.rows * p.columns * p.inner * p.batch,
                 .bytes = (uint64_t)(p.batch * (read + written))});
  return CUBLAS_STATUS_SUCCESS;
}

// ---- cuBLAS

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
  *handle = calloc(1, sizeof **handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  *mode = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode) {
  *mode = handle->pointers;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                            int k, const void *alpha, const void *A, cudaDataType Atype, int lda, const void *B,
                            cudaDataType Btype, int ldb, const void *beta, void *C, cudaDataType Ctype, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return multiply((Product){"cublasGemmEx", m, n, k, 1, Atype, Ctype, handle->stream});
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                          int m, int n, int k, const void *alpha, const void *A, cudaDataType Atype,
                                          int lda, long long stride_a, const void *B, cudaDataType Btype, int ldb,
                                          long long stride_b, const void *beta, void *C, cudaDataType Ctype, int ldc,
                                          long long stride_c, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm) {
  return multiply((Product){"cublasGemmStridedBatchedEx", m, n, k, batch, Atype, Ctype, handle->stream});
}

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                           int k, const float *alpha, const float *A, int lda, const float *B, int ldb,
                           const float *beta, float *C, int ldc) {
  return multiply((Product){"cublasSgemm", m, n, k, 1, CUDA_R_32F, CUDA_R_32F, handle->stream});
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                         int m, int n, int k, const float *alpha, const float *A, int lda,
                                         long long stride_a, const float *B, int ldb, long long stride_b,
                                         const float *beta, float *C, int ldc, long long stride_c, int batch) {
  return multiply((Product){"cublasSgemmStridedBatched", m, n, k, batch, CUDA_R_32F, CUDA_R_32F, handle->stream});
}

cublasStatus_t cublasSgemv(cublasHandle_t handle, cublasOperation_t trans, int m, int n, const float *alpha,
                           const float *A, int lda, const float *x, int incx, const float *beta, float *y, int incy) {
  return multiply((Product){"cublasSgemv", m, 1, n, 1, CUDA_R_32F, CUDA_R_32F, handle->stream});
}

// ---- cuBLASLt: descriptors contain only what is needed to count operations and bytes

typedef struct {
  cublasOperation_t transa;
} Operation;

typedef struct {
  cudaDataType type;
  uint64_t rows, columns;
  int32_t batch;
} Layout;

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *operation, cublasComputeType_t compute,
                                        cudaDataType scale) {
  *operation = calloc(1, sizeof **operation);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) memcpy(&((Operation *)operation)->transa, value, sizeof(int32_t));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
  Layout *contents = malloc(sizeof **layout);
  *contents = (Layout){type, rows, columns, 1};
  *layout = (cublasLtMatrixLayout_t)contents;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&((Layout *)layout)->batch, value, sizeof(int32_t));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B,
                                              cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *result_count) {
  memset(results, 0, sizeof *results);
  *result_count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t Adesc, const void *B, cublasLtMatrixLayout_t Bdesc,
                              const void *beta, const void *C, cublasLtMatrixLayout_t Cdesc, void *D,
                              cublasLtMatrixLayout_t Ddesc, const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  const Layout *a = (Layout *)Adesc, *d = (Layout *)Ddesc;
  double inner = ((Operation *)operation)->transa == CUBLAS_OP_N ? a->columns : a->rows;
  return multiply((Product){"cublasLtMatmul", d->rows, d->columns, inner, d->batch, a->type, d->type, stream});
}

// Matrix products through cuBLAS (through gemv.cu and stream_gemm.cu for a few rows). All matrices
// are row-major, so cuBLAS (column-major) sees their transposes. Inputs are bf16 or f32, sums are
// f32; f32 inputs are multiplied as f32, not as TF32. Where a result adds to what is there (weight
// gradients, a bias laid down first), the sum is taken in f32 and rounded once.
#include <cublas_v2.h>

#include "ops/cuda/device.h"
#include "ops/cuda/gemv.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/pinned_gemm.h"
#include "ops/cuda/stream_gemm.h"

namespace tandem::cuda {
namespace {

void check_blas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("cuBLAS: ") + call + ": " + cublasGetStatusString(status));
}

constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;

// One handle a process: its calls come from one thread at a time (the compute thread, or torch's
// backward thread while the compute thread waits for it).
cublasHandle_t handle() {
  static const cublasHandle_t made = [] {
    cublasHandle_t h = nullptr;
    check_blas(cublasCreate(&h), "cublasCreate");
    check_blas(cublasSetMathMode(h, CUBLAS_DEFAULT_MATH), "cublasSetMathMode");
    return h;
  }();
  static void* const workspace = [] {
    void* p = nullptr;
    CHECK_CUDA(cudaMalloc(&p, kWorkspaceBytes));
    return p;
  }();
  check_blas(cublasSetStream(made, stream()), "cublasSetStream");
  check_blas(cublasSetWorkspace(made, workspace, kWorkspaceBytes), "cublasSetWorkspace");
  return made;
}

cudaDataType_t type_of(Element e) { return e == Element::f32 ? CUDA_R_32F : CUDA_R_16BF; }

struct Operand {
  const void* data;
  cublasOperation_t op;
  std::int64_t stride;
};

// c[m, n] (column-major) = a·b, plus c itself if add.
void multiply(Element e, std::int64_t m, std::int64_t n, std::int64_t k, Operand a, Operand b,
              void* c, bool c_is_f32, std::int64_t stride, bool add) {
  if (m == 0 || n == 0) return;
  const float one = 1.0f, beta = add ? 1.0f : 0.0f;
  check_blas(cublasGemmEx(handle(), a.op, b.op, static_cast<int>(m), static_cast<int>(n),
                          static_cast<int>(k), &one, a.data, type_of(e), static_cast<int>(a.stride),
                          b.data, type_of(e), static_cast<int>(b.stride), &beta, c,
                          c_is_f32 ? CUDA_R_32F : type_of(e), static_cast<int>(stride),
                          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
             "cublasGemmEx");
}

// dy in the element type: itself, or a rounded copy.
class Rounded {
 public:
  Rounded(Element e, const void* dy, bool dy_is_f32, std::int64_t count)
      : copy_(e == Element::bf16 && dy_is_f32 ? count * 2 : 0), data_(dy) {
    if (e != Element::bf16 || !dy_is_f32) return;
    to_bf16(static_cast<const float*>(dy), copy_.as<bf16>(), count);
    data_ = copy_.as<void>();
  }
  const void* data() const { return data_; }

 private:
  Scratch copy_;
  const void* data_;
};

}  // namespace

void linear(Element e, const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
            std::int64_t rows, std::int64_t n, std::int64_t k) {
  if (exact_mode()) return linear_cut(e, x, w, bias, y, y_is_f32, rows, n, k, n);
  if (!y_is_f32 && stream_takes(e, x, w, rows, n, k))
    return stream_linear(x, w, bias, y, rows, n, k);
  if (gemv_takes(e, x, w, rows, n, k)) return gemv(x, w, bias, y, y_is_f32, rows, n, k);
  if (bias) fill_rows(e, bias, y, y_is_f32, rows, n);
  multiply(e, n, rows, k, {w, CUBLAS_OP_T, k}, {x, CUBLAS_OP_N, k}, y, y_is_f32, n,
           bias != nullptr);
}

void linear_cut(Element e, const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
                std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t whole_n) {
  if (!exact_mode()) return linear(e, x, w, bias, y, y_is_f32, rows, n, k);
  if (bias) fill_rows(e, bias, y, y_is_f32, rows, n);
  pinned_linear(e, x, w, y, y_is_f32, bias != nullptr, rows, n, k, whole_n);
}

bool linear_gated(Element e, Activation activation, const void* x, const void* w, const void* bias,
                  void* y, std::int64_t rows, std::int64_t n, std::int64_t k) {
  if (exact_mode() || !stream_takes_gated(e, x, w, rows, n, k)) return false;
  stream_gated(activation, x, w, bias, y, rows, n, k);
  return true;
}

void linear_dx(Element e, const void* dy, bool dy_is_f32, const void* w, void* dx,
               std::int64_t rows, std::int64_t n, std::int64_t k) {
  const Rounded d(e, dy, dy_is_f32, rows * n);
  multiply(e, k, rows, n, {w, CUBLAS_OP_N, k}, {d.data(), CUBLAS_OP_N, n}, dx, false, k, false);
}

void linear_dw(Element e, const void* dy, bool dy_is_f32, const void* x, float* dw, bool accumulate,
               std::int64_t rows, std::int64_t n, std::int64_t k) {
  const Rounded d(e, dy, dy_is_f32, rows * n);
  multiply(e, k, n, rows, {x, CUBLAS_OP_N, k}, {d.data(), CUBLAS_OP_T, n}, dw, true, k, accumulate);
}

}  // namespace tandem::cuda

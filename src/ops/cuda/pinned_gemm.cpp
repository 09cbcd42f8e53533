// Choosing, proving and running the pinned algorithms (cublasLt). An algorithm that cuts the inner
// dimension (split-K) is never taken: then an output's sum runs over the inner dimension in the one
// order of the kernel's tiles, and the rows are only a matter of how many tiles there are.
#include "ops/cuda/pinned_gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kChosenFor = 512;  // rows
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

void check_lt(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("cuBLAS: ") + call + ": " + cublasGetStatusString(status));
}

cublasLtHandle_t handle() {
  static const cublasLtHandle_t made = [] {
    cublasLtHandle_t h = nullptr;
    check_lt(cublasLtCreate(&h), "cublasLtCreate");
    return h;
  }();
  return made;
}

void* workspace() {
  static void* const made = [] {
    void* p = nullptr;
    CHECK_CUDA(cudaMalloc(&p, kWorkspaceBytes));
    return p;
  }();
  return made;
}

cudaDataType_t type_of(Element e) { return e == Element::f32 ? CUDA_R_32F : CUDA_R_16BF; }

// The descriptors of one product, freed together.
struct Problem {
  Problem(Element e, bool y_is_f32, std::int64_t rows, std::int64_t n, std::int64_t k) {
    const auto uk = static_cast<std::uint64_t>(k), un = static_cast<std::uint64_t>(n),
               ur = static_cast<std::uint64_t>(rows);
    check_lt(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "MatmulDesc");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check_lt(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                            sizeof transposed),
             "TRANSA");
    check_lt(cublasLtMatrixLayoutCreate(&w, type_of(e), uk, un, k), "layout of W");
    check_lt(cublasLtMatrixLayoutCreate(&x, type_of(e), uk, ur, k), "layout of x");
    check_lt(cublasLtMatrixLayoutCreate(&y, y_is_f32 ? CUDA_R_32F : type_of(e), un, ur, n),
             "layout of y");
  }
  ~Problem() {
    cublasLtMatrixLayoutDestroy(y);
    cublasLtMatrixLayoutDestroy(x);
    cublasLtMatrixLayoutDestroy(w);
    cublasLtMatmulDescDestroy(product);
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
};

using Key = std::tuple<Element, bool, std::int64_t, std::int64_t>;  // y_is_f32, n, k

std::string name_of(const Key& key) {
  return std::to_string(std::get<3>(key)) + " -> " + std::to_string(std::get<2>(key));
}

cublasLtMatmulAlgo_t choose(const Key& key) {
  const auto [e, y_is_f32, n, k] = key;
  const Problem p(e, y_is_f32, kChosenFor, n, k);
  cublasLtMatmulPreference_t preference = nullptr;
  check_lt(cublasLtMatmulPreferenceCreate(&preference), "MatmulPreference");
  const std::uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                       &no_reduction, sizeof no_reduction);
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                       &kWorkspaceBytes, sizeof kWorkspaceBytes);
  // Rows may begin at any multiple of the element's size.
  const std::uint32_t element_bytes = e == Element::f32 ? 4 : 2;
  const std::uint32_t alignment = k % 8 == 0 && n % 8 == 0 ? 16 : element_bytes;
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof alignment);
  cublasLtMatmulHeuristicResult_t found[16];
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle(), p.product, p.w, p.x, p.y,
                                                               p.y, preference, 16, found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  check_lt(status, "MatmulAlgoGetHeuristic");
  for (int i = 0; i < count; ++i) {
    std::int32_t splits = 1;
    std::size_t written = 0;
    cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                         sizeof splits, &written);
    if (found[i].state == CUBLAS_STATUS_SUCCESS && splits <= 1) return found[i].algo;
  }
  throw std::runtime_error("--true-on-policy-mode: cuBLAS has no algorithm without split-K for " +
                           name_of(key));
}

void run(const Key& key, const cublasLtMatmulAlgo_t& algorithm, const void* x, const void* w,
         void* y, bool add, std::int64_t rows) {
  const auto [e, y_is_f32, n, k] = key;
  const Problem p(e, y_is_f32, rows, n, k);
  const float one = 1.0f, beta = add ? 1.0f : 0.0f;
  check_lt(cublasLtMatmul(handle(), p.product, &one, w, p.w, x, p.x, &beta, y, p.y, y, p.y,
                          &algorithm, workspace(), kWorkspaceBytes, stream()),
           ("Matmul " + name_of(key) + " of " + std::to_string(rows) + " rows").c_str());
}

// Random values of one product's operands, and results side by side.
class Trial {
 public:
  explicit Trial(const Key& key)
      : key_(key),
        random_(static_cast<unsigned>(n() * 31 + k())),
        x_(kChosenFor * k() * size()),
        w_(n() * k() * size()),
        y_(kChosenFor * n() * out_size()) {
    fill(x_, kChosenFor * k());
    fill(w_, n() * k());
  }
  std::int64_t n() const { return std::get<2>(key_); }
  std::int64_t k() const { return std::get<3>(key_); }
  std::int64_t out_size() const { return std::get<1>(key_) ? 4 : size(); }
  // The bytes of y[rows, columns] with the first so many columns alone.
  std::vector<char> run_alone(const cublasLtMatmulAlgo_t& algorithm, std::int64_t rows,
                              std::int64_t columns) const {
    Key key = key_;
    std::get<2>(key) = columns;
    run(key, algorithm, x_.as<void>(), w_.as<void>(), y_.as<void>(), false, rows);
    std::vector<char> bytes(static_cast<std::size_t>(rows * columns * out_size()));
    CHECK_CUDA(cudaMemcpyAsync(bytes.data(), y_.as<void>(), bytes.size(), cudaMemcpyDeviceToHost,
                               stream()));
    CHECK_CUDA(cudaStreamSynchronize(stream()));
    return bytes;
  }

 private:
  Element element() const { return std::get<0>(key_); }
  std::int64_t size() const { return element() == Element::f32 ? 4 : 2; }
  // One random line, shifted from row to row, is random enough and quick to make.
  void fill(const Scratch& to, std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(count)), pool(65521);
    for (float& v : pool) v = normal(random_);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = pool[i % pool.size()];
    const Scratch wide(count * 4);
    CHECK_CUDA(cudaMemcpyAsync(wide.as<void>(), values.data(), values.size() * 4,
                               cudaMemcpyHostToDevice, stream()));
    if (element() == Element::f32)
      copy_f32(wide.as<float>(), to.as<float>(), count);
    else
      to_bf16(wide.as<float>(), to.as<bf16>(), count);
    CHECK_CUDA(cudaStreamSynchronize(stream()));
  }

  Key key_;
  std::mt19937 random_;
  Scratch x_, w_, y_;
};

// Error unless each number of rows gives the first rows of kChosenFor, bit for bit.
void prove_rows(const Key& key, const cublasLtMatmulAlgo_t& algorithm) {
  const Trial trial(key);
  const auto want = trial.run_alone(algorithm, kChosenFor, trial.n());
  for (const std::int64_t rows : {1, 7, 64, 300}) {
    const auto got = trial.run_alone(algorithm, rows, trial.n());
    if (!std::equal(got.begin(), got.end(), want.begin()))
      throw std::runtime_error("--true-on-policy-mode: the product " + name_of(key) + " of " +
                               std::to_string(rows) + " rows is not that of " +
                               std::to_string(kChosenFor) + " rows, bit for bit, on this GPU");
  }
}

// Error unless the first `columns` of the result are the same alone.
void prove_cut(const Key& key, const cublasLtMatmulAlgo_t& algorithm, std::int64_t columns) {
  constexpr std::int64_t kRows = 64;
  const Trial trial(key);
  const auto want = trial.run_alone(algorithm, kRows, trial.n());
  const auto got = trial.run_alone(algorithm, kRows, columns);
  const auto row = static_cast<std::ptrdiff_t>(columns * trial.out_size()),
             whole = static_cast<std::ptrdiff_t>(trial.n() * trial.out_size());
  for (std::ptrdiff_t r = 0; r < kRows; ++r)
    if (!std::equal(got.begin() + r * row, got.begin() + (r + 1) * row, want.begin() + r * whole))
      throw std::runtime_error("--true-on-policy-mode: " + std::to_string(columns) +
                               " columns of the product " + name_of(key) +
                               " are not the same alone, bit for bit, on this GPU; give an engine "
                               "one rank");
}

}  // namespace

void pinned_linear(Element e, const void* x, const void* w, void* y, bool y_is_f32, bool add,
                   std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t whole_n) {
  static std::map<Key, cublasLtMatmulAlgo_t> algorithms;
  static std::set<std::pair<Key, std::int64_t>> proven_cuts;
  if (rows == 0) return;
  const Key whole{e, y_is_f32 || e == Element::f32, whole_n, k};
  auto found = algorithms.find(whole);
  if (found == algorithms.end()) {
    const cublasLtMatmulAlgo_t algorithm = choose(whole);
    prove_rows(whole, algorithm);
    found = algorithms.emplace(whole, algorithm).first;
  }
  if (n != whole_n && !proven_cuts.contains({whole, n})) {
    prove_cut(whole, found->second, n);
    proven_cuts.emplace(whole, n);
  }
  Key key = whole;
  std::get<2>(key) = n;
  run(key, found->second, x, w, y, add, rows);
}

}  // namespace tandem::cuda

// Building the table (layer by layer, in the order of the forward pass) and moving rows in and out.
#include "model/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "ops/kernels/kernels.h"

namespace tandem {
namespace {

constexpr std::int64_t kAlignment = 4096;

std::int64_t element_bytes(Element e) { return e == Element::f32 ? 4 : 2; }

// Collects storages in the order of the forward pass.
class LayoutBuilder {
 public:
  LayoutBuilder(Element element, std::int64_t tp_rank, std::int64_t tp_size)
      : tp_rank_(tp_rank), tp_size_(tp_size) {
    layout_.element = element;
  }

  struct Part {
    std::string hf_name;
    std::int64_t rows;  // of the Hugging Face tensor; 1 for vectors
  };

  // A matrix of parts one under the other, each cut by rows over the ranks.
  void matrix(std::string name, std::int64_t cols, const std::vector<Part>& parts) {
    begin(std::move(name), Layout::panels, cols);
    for (const Part& p : parts) cut(p, {p.rows, cols});
    end();
  }
  // Vectors that lie one after the other, cut like the rows of the matrix they belong to.
  void bias(std::string name, const std::vector<Part>& parts) {
    begin(std::move(name), Layout::row_major, 1);
    for (const Part& p : parts) cut(p, {p.rows});
    end();
  }
  // A vector that every rank holds whole.
  void vector(std::string name, std::string hf_name, std::int64_t n) {
    begin(std::move(name), Layout::row_major, n);
    place(std::move(hf_name), {n}, 1, 0);
    end();
  }
  ArenaLayout take() { return std::move(layout_); }

 private:
  void begin(std::string name, Layout layout, std::int64_t cols) {
    storage_ = {.name = std::move(name),
                .layout = layout,
                .rows = 0,
                .cols = cols,
                .offset_bytes = layout_.bytes,
                .bytes = 0,
                .flat_begin = layout_.flat_elements};
  }
  void cut(const Part& p, std::vector<std::int64_t> shape) {
    TD_CHECK(p.rows % tp_size_ == 0, "{}: {} rows cannot be cut over {} tensor-parallel ranks",
             p.hf_name, p.rows, tp_size_);
    const std::int64_t rows = p.rows / tp_size_;
    place(p.hf_name, std::move(shape), rows, tp_rank_ * rows);
  }
  void place(std::string hf_name, std::vector<std::int64_t> shape, std::int64_t rows,
             std::int64_t global_row) {
    layout_.entries.push_back({.hf_name = std::move(hf_name),
                               .hf_shape = std::move(shape),
                               .storage = static_cast<std::int64_t>(layout_.storages.size()),
                               .row_begin = storage_.rows,
                               .rows = rows,
                               .global_row = global_row,
                               .flat_begin = storage_.flat_begin + storage_.rows * storage_.cols});
    storage_.rows += rows;
  }
  void end() {
    const std::int64_t size = element_bytes(layout_.element);
    if (storage_.layout == Layout::panels) {
      const std::int64_t k =
          layout_.element == Element::f32 ? storage_.cols : round_up(storage_.cols, 2);
      storage_.bytes = round_up(storage_.rows, kPanel) * k * size;
    } else {
      storage_.bytes = storage_.rows * storage_.cols * size;
    }
    layout_.bytes = round_up(layout_.bytes + storage_.bytes, kAlignment);
    layout_.flat_elements += storage_.rows * storage_.cols;
    layout_.storages.push_back(std::move(storage_));
  }

  std::int64_t tp_rank_, tp_size_;
  ArenaLayout layout_;
  ArenaStorage storage_;
};

void add_layer(LayoutBuilder& b, const ModelConfig& c, std::int64_t layer) {
  const std::string hf = fmt::format("model.layers.{}.", layer),
                    own = fmt::format("layers.{}.", layer);
  b.vector(own + "input_norm", hf + "input_layernorm.weight", c.hidden_size);
  b.matrix(own + "qkv", c.hidden_size,
           {{hf + "self_attn.q_proj.weight", c.q_rows()},
            {hf + "self_attn.k_proj.weight", c.kv_rows()},
            {hf + "self_attn.v_proj.weight", c.kv_rows()}});
  if (c.qkv_bias)
    b.bias(own + "qkv_bias", {{hf + "self_attn.q_proj.bias", c.q_rows()},
                              {hf + "self_attn.k_proj.bias", c.kv_rows()},
                              {hf + "self_attn.v_proj.bias", c.kv_rows()}});
  if (c.qk_norm) {
    b.vector(own + "q_norm", hf + "self_attn.q_norm.weight", c.head_dim);
    b.vector(own + "k_norm", hf + "self_attn.k_norm.weight", c.head_dim);
  }
  b.matrix(own + "o", c.q_rows(), {{hf + "self_attn.o_proj.weight", c.hidden_size}});
  if (c.o_bias) b.bias(own + "o_bias", {{hf + "self_attn.o_proj.bias", c.hidden_size}});
  b.vector(own + "post_norm", hf + "post_attention_layernorm.weight", c.hidden_size);
  b.matrix(own + "gate_up", c.hidden_size,
           {{hf + "mlp.gate_proj.weight", c.intermediate_size},
            {hf + "mlp.up_proj.weight", c.intermediate_size}});
  if (c.mlp_bias)
    b.bias(own + "gate_up_bias", {{hf + "mlp.gate_proj.bias", c.intermediate_size},
                                  {hf + "mlp.up_proj.bias", c.intermediate_size}});
  b.matrix(own + "down", c.intermediate_size, {{hf + "mlp.down_proj.weight", c.hidden_size}});
  if (c.mlp_bias) b.bias(own + "down_bias", {{hf + "mlp.down_proj.bias", c.hidden_size}});
}

}  // namespace

ArenaLayout make_arena_layout(const ModelConfig& c, Element element, std::int64_t tp_rank,
                              std::int64_t tp_size) {
  TD_CHECK(tp_size >= 1 && tp_rank >= 0 && tp_rank < tp_size,
           "tensor-parallel rank {} of {}: a rank in [0, size) wanted", tp_rank, tp_size);
  TD_CHECK(c.num_heads % tp_size == 0 && c.num_kv_heads % tp_size == 0,
           "num_attention_heads {} and num_key_value_heads {} cannot be cut over {} "
           "tensor-parallel ranks",
           c.num_heads, c.num_kv_heads, tp_size);
  LayoutBuilder b(element, tp_rank, tp_size);
  b.matrix("embed", c.hidden_size, {{"model.embed_tokens.weight", c.vocab_size}});
  for (std::int64_t l = 0; l < c.num_layers; ++l) add_layer(b, c, l);
  b.vector("norm", "model.norm.weight", c.hidden_size);
  if (!c.tie_word_embeddings) b.matrix("head", c.hidden_size, {{"lm_head.weight", c.vocab_size}});
  return b.take();
}

Arena::Arena(ArenaLayout layout) : layout_(std::move(layout)) {
  void* p = mmap(nullptr, static_cast<std::size_t>(layout_.bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TD_CHECK(p != MAP_FAILED, "weight arena: {} bytes cannot be mapped: {}", layout_.bytes,
           std::strerror(errno));
  madvise(p, static_cast<std::size_t>(layout_.bytes), MADV_HUGEPAGE);
  memory_ = static_cast<std::byte*>(p);
}

Arena::~Arena() { munmap(memory_, static_cast<std::size_t>(layout_.bytes)); }

void* Arena::storage_data(std::int64_t storage) const {
  return memory_ + layout_.storages[storage].offset_bytes;
}

std::int64_t Arena::storage_index(std::string_view name) const {
  for (std::size_t i = 0; i < layout_.storages.size(); ++i)
    if (layout_.storages[i].name == name) return static_cast<std::int64_t>(i);
  throw Error(fmt::format("weight arena: no storage is called '{}'", name));
}

void Arena::write_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                       const float* source) {
  const ArenaStorage& s = layout_.storages[entry.storage];
  if (s.layout == Layout::panels) {
    kernels().write_panels(layout_.element, storage_data(entry.storage), s.cols,
                           entry.row_begin + row, rows, source);
    return;
  }
  const std::int64_t begin = (entry.row_begin + row) * s.cols;
  if (layout_.element == Element::f32)
    std::copy_n(source, rows * s.cols, static_cast<float*>(storage_data(entry.storage)) + begin);
  else
    kernels().to_bf16(source, static_cast<bf16*>(storage_data(entry.storage)) + begin,
                      rows * s.cols);
}

void Arena::read_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                      float* target) const {
  const ArenaStorage& s = layout_.storages[entry.storage];
  if (s.layout == Layout::panels) {
    kernels().read_panels(layout_.element, storage_data(entry.storage), s.cols,
                          entry.row_begin + row, rows, target);
    return;
  }
  const std::int64_t begin = (entry.row_begin + row) * s.cols;
  if (layout_.element == Element::f32)
    std::copy_n(static_cast<const float*>(storage_data(entry.storage)) + begin, rows * s.cols,
                target);
  else
    kernels().to_f32(static_cast<const bf16*>(storage_data(entry.storage)) + begin, target,
                     rows * s.cols);
}

void Arena::write_flat(std::int64_t begin, std::int64_t end, const float* source) {
  for (const ArenaEntry& e : layout_.entries) {
    const std::int64_t cols = layout_.storages[e.storage].cols;
    const std::int64_t b = std::max(begin, e.flat_begin);
    const std::int64_t f = std::min(end, e.flat_begin + e.rows * cols);
    if (b >= f) continue;
    TD_CHECK((b - e.flat_begin) % cols == 0 && (f - e.flat_begin) % cols == 0,
             "{}: flat range [{}, {}) cuts a row", e.hf_name, begin, end);
    write_rows(e, (b - e.flat_begin) / cols, (f - b) / cols, source + (b - begin));
  }
}

void Arena::read_flat(float* target) const {
  for (const ArenaEntry& e : layout_.entries) read_rows(e, 0, e.rows, target + e.flat_begin);
}

}  // namespace tandem

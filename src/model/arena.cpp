// Building the table (layer by layer, in the order of the forward pass) and moving rows in and out.
#include "model/arena.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "ops/kernels/kernels.h"

namespace tandem {
namespace {

constexpr std::int64_t kAlignment = 4096;

std::int64_t element_bytes(Element e) { return e == Element::f32 ? 4 : 2; }

// Collects storages in the order of the forward pass.
class LayoutBuilder {
 public:
  LayoutBuilder(Element element, std::int64_t tp_rank, std::int64_t tp_size, Place place)
      : tp_rank_(tp_rank), tp_size_(tp_size) {
    layout_.element = element;
    layout_.place = place;
  }

  struct Part {
    std::string hf_name;
    std::int64_t rows;  // of the Hugging Face tensor; 1 for vectors
  };

  // A matrix of parts one under the other, each cut by rows over the ranks.
  void matrix(std::string name, std::int64_t cols, const std::vector<Part>& parts) {
    begin(std::move(name), true, cols);
    for (const Part& p : parts) cut(p, {p.rows, cols});
    end();
  }
  // Vectors that lie one after the other, cut like the rows of the matrix they belong to.
  void bias(std::string name, const std::vector<Part>& parts) {
    begin(std::move(name), false, 1);
    for (const Part& p : parts) cut(p, {p.rows});
    end();
  }
  // A vector that every rank holds whole.
  void vector(std::string name, std::string hf_name, std::int64_t n) {
    begin(std::move(name), false, n);
    place(std::move(hf_name), {n}, 1, 0);
    end();
  }
  ArenaLayout take() { return std::move(layout_); }

 private:
  void begin(std::string name, bool matrix, std::int64_t cols) {
    const bool panels = matrix && layout_.place == Place::cpu;
    storage_ = {.name = std::move(name),
                .matrix = matrix,
                .layout = panels ? Layout::panels : Layout::row_major,
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
                              std::int64_t tp_size, Place place) {
  TD_CHECK(tp_size >= 1 && tp_rank >= 0 && tp_rank < tp_size,
           "tensor-parallel rank {} of {}: a rank in [0, size) wanted", tp_rank, tp_size);
  TD_CHECK(c.num_heads % tp_size == 0 && c.num_kv_heads % tp_size == 0,
           "num_attention_heads {} and num_key_value_heads {} cannot be cut over {} "
           "tensor-parallel ranks",
           c.num_heads, c.num_kv_heads, tp_size);
  LayoutBuilder b(element, tp_rank, tp_size, place);
  b.matrix("embed", c.hidden_size, {{"model.embed_tokens.weight", c.vocab_size}});
  for (std::int64_t l = 0; l < c.num_layers; ++l) add_layer(b, c, l);
  b.vector("norm", "model.norm.weight", c.hidden_size);
  if (!c.tie_word_embeddings) b.matrix("head", c.hidden_size, {{"lm_head.weight", c.vocab_size}});
  return b.take();
}

Arena::Arena(ArenaLayout layout, bool shared)
    : layout_(std::move(layout)), memory_(layout_.place, layout_.bytes, "weight arena", shared) {}

void* Arena::storage_data(std::int64_t storage) const {
  return static_cast<std::byte*>(memory_.data()) + layout_.storages[storage].offset_bytes;
}

std::int64_t Arena::storage_index(std::string_view name) const {
  for (std::size_t i = 0; i < layout_.storages.size(); ++i)
    if (layout_.storages[i].name == name) return static_cast<std::int64_t>(i);
  throw Error(fmt::format("weight arena: no storage is called '{}'", name));
}

// Where rows of an entry lie in a row-major storage.
std::byte* Arena::row_address(const ArenaEntry& entry, std::int64_t row) const {
  return static_cast<std::byte*>(storage_data(entry.storage)) +
         (entry.row_begin + row) * layout_.storages[entry.storage].cols *
             element_bytes(layout_.element);
}

void Arena::write_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                       const float* source) {
  const ArenaStorage& s = layout_.storages[entry.storage];
  if (s.layout == Layout::panels) {
    kernels().write_panels(layout_.element, storage_data(entry.storage), s.cols,
                           entry.row_begin + row, rows, source);
    return;
  }
  const std::int64_t count = rows * s.cols;
  if (layout_.element == Element::f32) {
    write_memory(place(), row_address(entry, row), source, count * 4);
    return;
  }
  std::vector<bf16> narrow(static_cast<std::size_t>(count));
  kernels().to_bf16(source, narrow.data(), count);
  write_memory(place(), row_address(entry, row), narrow.data(), count * 2);
}

void Arena::read_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                      float* target) const {
  const ArenaStorage& s = layout_.storages[entry.storage];
  if (s.layout == Layout::panels) {
    kernels().read_panels(layout_.element, storage_data(entry.storage), s.cols,
                          entry.row_begin + row, rows, target);
    return;
  }
  const std::int64_t count = rows * s.cols;
  if (layout_.element == Element::f32) {
    read_memory(place(), target, row_address(entry, row), count * 4);
    return;
  }
  std::vector<bf16> narrow(static_cast<std::size_t>(count));
  read_memory(place(), narrow.data(), row_address(entry, row), count * 2);
  kernels().to_f32(narrow.data(), target, count);
}

// Rows from where the arena lies itself.
void Arena::copy_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                      const float* source) {
  if (place() == Place::cpu) return write_rows(entry, row, rows, source);
  const std::int64_t count = rows * layout_.storages[entry.storage].cols;
  const Kernels& k = kernels(place());
  if (layout_.element == Element::f32)
    k.copy_f32(source, reinterpret_cast<float*>(row_address(entry, row)), count);
  else
    k.to_bf16(source, reinterpret_cast<bf16*>(row_address(entry, row)), count);
}

void Arena::write_flat(std::int64_t begin, std::int64_t end, const float* source) {
  for (const ArenaEntry& e : layout_.entries) {
    const std::int64_t cols = layout_.storages[e.storage].cols;
    const std::int64_t b = std::max(begin, e.flat_begin);
    const std::int64_t f = std::min(end, e.flat_begin + e.rows * cols);
    if (b >= f) continue;
    TD_CHECK((b - e.flat_begin) % cols == 0 && (f - e.flat_begin) % cols == 0,
             "{}: flat range [{}, {}) cuts a row", e.hf_name, begin, end);
    copy_rows(e, (b - e.flat_begin) / cols, (f - b) / cols, source + (b - begin));
  }
}

void Arena::read_flat(float* target) const {
  for (const ArenaEntry& e : layout_.entries) read_rows(e, 0, e.rows, target + e.flat_begin);
}

}  // namespace tandem

// The bytes that each token id stands for, read from a folder's tokenizer.json. Where text is
// needed token by token (texts that end an answer, streams) this takes the place of the Python
// tokenizer.
//
// A token's bytes need not be whole characters; only their sequence is UTF-8. They follow the
// file's decoder: ByteLevel (each character of a token names a byte), or Replace, ByteFallback,
// Fuse, Strip and Metaspace in the SentencePiece manner. Invariant: joined, the bytes of a
// sequence's ids are what the tokenizers library decodes with special tokens kept, where that is
// valid UTF-8; a space that such a decoder strips from the very beginning is the only difference
// (strips_first_space).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/sample.h"

namespace tandem {

class Vocabulary {
 public:
  // Error naming the file, and the decoder if it is one of another kind.
  static Vocabulary load(const std::string& folder);
  // The same from the content of a tokenizer.json; `source` begins every error.
  static Vocabulary parse(std::string_view json, std::string_view source);

  std::int64_t size() const { return static_cast<std::int64_t>(special_.size()); }
  // Empty for ids without a token (the padded end of an embedding).
  std::string_view bytes(TokenId id) const;
  bool is_special(TokenId id) const { return id >= 0 && id < size() && special_[id]; }
  std::size_t longest_bytes() const { return longest_; }
  // Whether decoding drops a space with which a text begins.
  bool strips_first_space() const { return strips_first_space_; }

 private:
  std::string all_;                   // the bytes of all ids, one after the other
  std::vector<std::uint32_t> begin_;  // [size + 1] into all_
  std::vector<bool> special_;
  std::size_t longest_ = 0;
  bool strips_first_space_ = false;
};

// The end of the longest beginning of `text` that does not break a character: what a stream may
// show. A byte that can belong to no character does not hold the rest back.
std::size_t whole_characters(std::string_view text);

}  // namespace tandem

// Reading tokenizer.json: ids of the model's vocabulary and of added tokens, and the decoder.
#include "data/vocabulary.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"

namespace tandem {
namespace {

struct Decoder {
  bool byte_level = false;     // characters name bytes
  bool byte_fallback = false;  // "<0x0A>" is a byte
  std::vector<std::pair<std::string, std::string>> replace;
  bool strips_first_space = false;
};

void read_decoder(const Json& json, const std::string& where, Decoder& decoder) {
  const auto type = require<std::string>(json, "type", where);
  if (type == "ByteLevel") {
    decoder.byte_level = true;
  } else if (type == "ByteFallback") {
    decoder.byte_fallback = true;
  } else if (type == "Fuse") {
    // Joins the tokens' texts: what we do anyhow.
  } else if (type == "Strip") {
    const auto content = require<std::string>(json, "content", where);
    const auto start = require<std::int64_t>(json, "start", where);
    const auto stop = require<std::int64_t>(json, "stop", where);
    TD_CHECK(content == " " && start <= 1 && stop == 0,
             "{}: Strip of '{}', {} at the start and {} at the end found; known is one space at "
             "the start",
             where, content, start, stop);
    decoder.strips_first_space = start == 1;
  } else if (type == "Replace") {
    const Json pattern = require<Json>(json, "pattern", where);
    decoder.replace.emplace_back(require<std::string>(pattern, "String", where),
                                 require<std::string>(json, "content", where));
  } else if (type == "Metaspace") {
    decoder.replace.emplace_back(require<std::string>(json, "replacement", where), " ");
    decoder.strips_first_space =
        optional_key<std::string>(json, "prepend_scheme", where, "always") != "never";
  } else if (type == "Sequence") {
    for (const Json& part : require<Json>(json, "decoders", where)) {
      read_decoder(part, where, decoder);
    }
  } else {
    throw Error(
        fmt::format("{}: '{}' found; known are ByteLevel, ByteFallback, Fuse, Metaspace, "
                    "Replace, Strip and a Sequence of them",
                    where, type));
  }
}

// The byte that a character of a ByteLevel token names (Radford et al. 2019): printable Latin-1
// characters are themselves, the other bytes follow in order from U+0100.
std::optional<char> named_byte(std::uint32_t character) {
  static const std::array<int, 512> kBytes = [] {
    std::array<int, 512> bytes;
    bytes.fill(-1);
    std::uint32_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      bytes[printable ? static_cast<std::uint32_t>(byte) : next++] = byte;
    }
    return bytes;
  }();
  if (character >= kBytes.size() || kBytes[character] < 0) return std::nullopt;
  return static_cast<char>(kBytes[character]);
}

// Bytes of the UTF-8 character that begins with `first`; 1 for what cannot begin one.
std::size_t character_bytes(unsigned char first) {
  if (first >= 0xF0 && first < 0xF5) return 4;
  if (first >= 0xE0) return first < 0xF0 ? 3 : 1;
  return first >= 0xC2 ? 2 : 1;
}

std::string byte_level_bytes(const std::string& token) {
  std::string bytes;
  for (std::size_t i = 0; i < token.size();) {
    const std::size_t length = character_bytes(static_cast<unsigned char>(token[i]));
    if (length > 2 || i + length > token.size()) return token;  // an added token: its own text
    std::uint32_t character = static_cast<unsigned char>(token[i]);
    if (length == 2) {
      character = (character & 0x1Fu) << 6 | (static_cast<unsigned char>(token[i + 1]) & 0x3Fu);
    }
    const auto byte = named_byte(character);
    if (!byte) return token;
    bytes.push_back(*byte);
    i += length;
  }
  return bytes;
}

std::optional<char> fallback_byte(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  int value = 0;
  for (const char digit : token.substr(3, 2)) {
    const auto at = std::string_view("0123456789ABCDEF").find(static_cast<char>(toupper(digit)));
    if (at == std::string_view::npos) return std::nullopt;
    value = 16 * value + static_cast<int>(at);
  }
  return static_cast<char>(value);
}

std::string token_bytes(const Decoder& decoder, std::string token) {
  if (decoder.byte_level) return byte_level_bytes(token);
  for (const auto& [from, to] : decoder.replace) {
    for (std::size_t at = 0; !from.empty() && (at = token.find(from, at)) != std::string::npos;
         at += to.size()) {
      token.replace(at, from.size(), to);
    }
  }
  if (decoder.byte_fallback) {
    if (const auto byte = fallback_byte(token)) return std::string(1, *byte);
  }
  return token;
}

// Tokens by id, from a map (BPE, WordLevel) or a list of [token, score] (Unigram).
std::vector<std::string> read_tokens(const Json& model, const std::string& where) {
  constexpr std::int64_t kMaxId = 1 << 24;
  std::vector<std::string> tokens;
  const Json& vocab = model.at("vocab");
  if (vocab.is_array()) {
    for (const Json& item : vocab) {
      TD_CHECK(item.is_array() && !item.empty(), "{}: {} found, wanted [token, score]", where,
               dump_json(item));
      tokens.push_back(read_value<std::string>(item[0], where));
    }
    return tokens;
  }
  for (const auto& [token, id] : vocab.items()) {
    const auto index = read_value<std::int64_t>(id, where);
    TD_CHECK(index >= 0 && index < kMaxId, "{}: id {} of '{}' found, wanted 0 to {}", where, index,
             token, kMaxId);
    if (index >= static_cast<std::int64_t>(tokens.size())) tokens.resize(index + 1);
    tokens[index] = token;
  }
  return tokens;
}

}  // namespace

Vocabulary Vocabulary::load(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json";
  return parse(read_file(path), path);
}

Vocabulary Vocabulary::parse(std::string_view text, std::string_view source) {
  const Json json = parse_json(text, source);
  const std::string where(source);
  Decoder decoder;
  read_decoder(require<Json>(json, "decoder", where), where + ": decoder", decoder);
  TD_CHECK(json.contains("model") && json.at("model").contains("vocab"),
           "{}: model.vocab is missing", source);
  std::vector<std::string> tokens = read_tokens(json.at("model"), where + ": model.vocab");
  std::vector<bool> special(tokens.size(), false);
  for (const Json& added : optional_key<Json>(json, "added_tokens", where, Json::array())) {
    const auto id = require<std::uint32_t>(added, "id", where + ": added_tokens");
    TD_CHECK(id < (1u << 24), "{}: added_tokens: id {} found", source, id);
    if (id >= tokens.size()) {
      tokens.resize(id + 1);
      special.resize(id + 1, false);
    }
    tokens[id] = require<std::string>(added, "content", where + ": added_tokens");
    special[id] = optional_key<bool>(added, "special", where + ": added_tokens", false);
  }
  Vocabulary vocabulary;
  vocabulary.strips_first_space_ = decoder.strips_first_space;
  vocabulary.special_ = std::move(special);
  vocabulary.begin_.push_back(0);
  for (std::string& token : tokens) {
    const std::string bytes = token_bytes(decoder, std::move(token));
    vocabulary.longest_ = std::max(vocabulary.longest_, bytes.size());
    vocabulary.all_ += bytes;
    vocabulary.begin_.push_back(static_cast<std::uint32_t>(vocabulary.all_.size()));
  }
  return vocabulary;
}

std::string_view Vocabulary::bytes(TokenId id) const {
  if (id < 0 || id >= size()) return {};
  return std::string_view(all_).substr(begin_[id], begin_[id + 1] - begin_[id]);
}

std::size_t whole_characters(std::string_view text) {
  // The last byte that can begin a character lies within four bytes of the end.
  for (std::size_t back = 1; back <= std::min<std::size_t>(4, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    return character_bytes(byte) > back ? text.size() - back : text.size();
  }
  return text.size();
}

}  // namespace tandem

// The sinks that write files: JSON lines and TensorBoard events. See sinks.h.
#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstring>

#include "base/check.h"
#include "base/log.h"
#include "metrics/sinks.h"

namespace tandem {
namespace {

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Cuts a last line without its newline, which only a crash leaves.
const std::string& without_torn_line(const std::string& path) {
  if (!file_exists(path)) return path;
  const std::string content = read_file(path);
  if (content.empty() || content.back() == '\n') return path;
  const std::size_t end = content.rfind('\n') + 1;  // npos + 1 == 0
  TD_LOG(warn, "{}: its last line was cut short by a crash; {} bytes removed", path,
         content.size() - end);
  TD_CHECK(::truncate(path.c_str(), static_cast<off_t>(end)) == 0, "{}: cannot shorten: {}", path,
           errno_text(errno));
  return path;
}

std::string little_endian(std::uint64_t value, int num_bytes) {
  std::string bytes;
  for (int i = 0; i < num_bytes; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

// Protobuf fields: a key of (number << 3 | wire type), then the value.
std::string bytes_field(int number, std::string_view bytes) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 2) + varint(bytes.size()) +
         std::string(bytes);
}
std::string varint_field(int number, std::int64_t value) {
  return varint(static_cast<std::uint64_t>(number) << 3) +
         varint(static_cast<std::uint64_t>(value));
}
std::string double_field(int number, double value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 1) +
         little_endian(std::bit_cast<std::uint64_t>(value), 8);
}
std::string float_field(int number, float value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 5) +
         little_endian(std::bit_cast<std::uint32_t>(value), 4);
}

std::string tf_record(std::string_view data) {
  const std::string length = little_endian(data.size(), 8);
  return length + little_endian(masked_crc32c(length), 4) + std::string(data) +
         little_endian(masked_crc32c(data), 4);
}

std::string event_file_name(const std::string& folder) {
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  create_folders(folder);
  return fmt::format("{}/events.out.tfevents.{}.{}.{}.0", folder,
                     static_cast<std::int64_t>(unix_seconds()), host, ::getpid());
}

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    table[i] = crc;
  }
  return table;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = make_crc_table();
  std::uint32_t crc = ~0u;
  for (const char c : bytes)
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

std::uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u;
}

JsonlSink::JsonlSink(const std::string& path) : file_(without_torn_line(path)) {}

void JsonlSink::write(std::int64_t step, const Row& row) {
  OrderedJson line = OrderedJson::object();
  line["step"] = step;
  line["time"] = unix_seconds();
  line.update(row.to_json());
  file_.append(dump_json(line) + "\n");
}

TensorBoardSink::TensorBoardSink(const std::string& folder, std::int64_t first_step)
    : file_(event_file_name(folder)) {
  // Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 7 session_log.
  file_.append(tf_record(double_field(1, unix_seconds()) + bytes_field(3, "brain.Event:2")));
  if (first_step == 0) return;
  constexpr std::int64_t kStart = 1;  // SessionLog.START: readers drop later steps seen before it
  file_.append(tf_record(double_field(1, unix_seconds()) + varint_field(2, first_step) +
                         bytes_field(7, varint_field(1, kStart))));
}

void TensorBoardSink::write(std::int64_t step, const Row& row) {
  std::string summary;  // Summary: 1 value, repeated; Value: 1 tag, 2 simple_value
  for (const std::string& name : row.names()) {
    summary +=
        bytes_field(1, bytes_field(1, name) + float_field(2, static_cast<float>(row.value(name))));
  }
  if (summary.empty()) return;
  file_.append(
      tf_record(double_field(1, unix_seconds()) + varint_field(2, step) + bytes_field(5, summary)));
}

}  // namespace tandem

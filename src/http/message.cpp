// See message.h.
#include "http/message.h"

#include "base/json.h"
#include "base/text.h"

namespace tandem::http {

Response error_response(int status, std::string_view message) {
  return {status, dump_json(Json{{"error", {{"message", message}}}})};
}

std::string error_message(const Response& response) {
  const Json body = Json::parse(response.body, nullptr, /*allow_exceptions=*/false);
  if (body.is_object() && body.contains("error")) {
    const Json& error = body["error"];
    if (error.is_string()) return error.get<std::string>();
    if (error.is_object() && error.contains("message") && error["message"].is_string()) {
      return error["message"].get<std::string>();
    }
  }
  return one_line(trim(response.body), 300);
}

}  // namespace tandem::http

// What the server and the client speak of: a request, a response, and the one form of an error
// body, {"error": {"message": …}}. No Boost here: includers compile fast.
#pragma once

#include <string>
#include <string_view>

namespace tandem::http {

struct Request {
  std::string method;  // "GET", "POST", …
  std::string path;    // "/generate", without the query
  std::string query;   // what follows '?', undecoded
  std::string content_type;
  std::string body;
};

struct Response {
  int status = 200;
  std::string body = {};
  std::string content_type = "application/json";

  bool ok() const { return status >= 200 && status < 300; }
};

// {"error":{"message":…}} with the given status.
Response error_response(int status, std::string_view message);

// The message of an error body, or the start of a body of another form. One line.
std::string error_message(const Response& response);

}  // namespace tandem::http

// The tokenizer process and what a prompt file becomes with it: real Python, a small tokenizer.
#include "data/tokenizer.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <functional>

#include "base/check.h"
#include "base/file.h"
#include "data/prompts.h"

namespace tandem {
namespace {

constexpr const char* kTokenizerJson =
    R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,)"
    R"("pre_tokenizer":{"type":"WhitespaceSplit"},"post_processor":null,"decoder":null,"model":)"
    R"({"type":"WordLevel","unk_token":"?","vocab":{"?":0,"hello":1,"world":2,"<user>":3,"<bot>":4}}})";
constexpr const char* kConfigJson =
    R"({"eos_token":"?","chat_template":"{% for m in messages %}<{{ m.role }}> {{ m.content }} )"
    R"({% endfor %}{{ tools | tojson if tools else '' }}<bot>"})";

class TokenizerTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = (std::filesystem::path(testing::TempDir()) /
               ("tokenizer_" +
                std::string(testing::UnitTest::GetInstance()->current_test_info()->name())))
                  .string();
    create_folders(folder_);
    write_file_atomic(folder_ + "/tokenizer.json", kTokenizerJson);
    write_file_atomic(folder_ + "/tokenizer_config.json", kConfigJson);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  TokenizerOptions options() const {
    TokenizerOptions result;
    result.folder = folder_;
    return result;
  }
  std::string write(const std::string& name, const std::string& content) {
    const std::string path = folder_ + "/" + name;
    write_file_atomic(path, content);
    return path;
  }
  // A process of a module written here, which can import the project's own.
  PythonProcessOptions module(const std::string& code, double timeout_seconds = 60) {
    write("module_here.py", code);
    PythonProcessOptions result;
    result.name = "module";
    result.module = "module_here";
    result.place.module_folder = folder_ + ":" + result.place.module_folder;
    result.call_timeout_seconds = timeout_seconds;
    return result;
  }
  static std::string error_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  std::string folder_;
};

using Ids = std::vector<TokenId>;

TEST_F(TokenizerTest, EncodesDecodesAndTemplatesInBatches) {
  TokenizerProcess tokenizer(options());
  std::vector<std::string> texts(1500, "hello");  // more than one call
  texts[1400] = "world hello";
  const auto rows = tokenizer.encode(texts);
  ASSERT_EQ(rows.size(), texts.size());
  EXPECT_EQ(rows[0].ids, Ids{1});
  EXPECT_EQ(rows[1400].ids, (Ids{2, 1}));
  EXPECT_EQ(tokenizer.decode(std::vector<Ids>{{1, 2}, {}})[0].text, "hello world");
  const std::vector<Conversation> conversations = {
      {R"([{"role":"user","content":"hello"}])", ""},
      {R"([{"role":"user"}, 7])", ""},
      {R"([{"role":"user","content":10254939386542155531}])", R"([{"z":1,"a":2}])"}};
  const auto templated = tokenizer.apply_chat_template(conversations);
  EXPECT_EQ(templated[0].text, "<user> hello <bot>");
  EXPECT_EQ(templated[0].ids, (Ids{3, 1, 4}));
  EXPECT_EQ(templated[2].text, R"(<user> 10254939386542155531 [{"z": 1, "a": 2}]<bot>)");
  EXPECT_EQ(tokenizer.process().num_starts(), 1);
  EXPECT_EQ(tokenizer.info()["vocab_size"], 5);
}

TEST_F(TokenizerTest, AKilledProcessCostsOneRetry) {
  TokenizerProcess tokenizer(options());
  const std::vector<std::string> texts = {"hello"};
  EXPECT_EQ(tokenizer.encode(texts)[0].ids, Ids{1});
  ASSERT_EQ(::kill(tokenizer.process().pid(), SIGKILL), 0);
  EXPECT_EQ(tokenizer.encode(texts)[0].ids, Ids{1});
  EXPECT_EQ(tokenizer.process().num_starts(), 2);
}

TEST_F(TokenizerTest, ASecondDeathIsAnErrorWithItsLastWords) {
  PythonProcess process(module("import sys\nsys.exit('words before the end')\n"));
  const std::string text = error_of([&] { process.call("{}"); });
  EXPECT_TRUE(text.starts_with("module (pid ")) << text;
  EXPECT_NE(text.find("exited with code 1"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("words before the end\n") || text.ends_with("words before the end"))
      << text;
  EXPECT_EQ(process.num_starts(), 2);
}

TEST_F(TokenizerTest, AFaultOfTheFolderIsToldAtTheFirstCall) {
  TokenizerOptions wrong = options();
  wrong.folder += "/absent";
  TokenizerProcess tokenizer(wrong);
  const std::string text = error_of([&] { tokenizer.info(); });
  EXPECT_NE(text.find(wrong.folder + ": no tokenizer.json"), std::string::npos) << text;
  EXPECT_EQ(tokenizer.process().num_starts(), 1);
}

TEST_F(TokenizerTest, AMissingInterpreterIsNamed) {
  TokenizerOptions wrong = options();
  wrong.place.interpreter = "/nowhere/python";
  const std::string text = error_of([&] { TokenizerProcess(wrong).info(); });
  EXPECT_TRUE(text.starts_with("/nowhere/python: the tokenizer needs")) << text;
}

TEST_F(TokenizerTest, ASilentProcessIsEndedAtTheDeadlineAndNotAskedAgain) {
  PythonProcess process(
      module("import sys, time\n"
             "from tandem import pipe\n"
             "def answer(request):\n"
             "    if request['wait']: time.sleep(60)\n"
             "    return {'good': True}\n"
             "pipe.serve(answer)\n",
             5));
  EXPECT_TRUE(process.call(R"({"wait":false})")["good"]);
  const std::string text = error_of([&] { process.call(R"({"wait":true})"); });
  EXPECT_NE(text.find("within 5"), std::string::npos) << text;
  EXPECT_EQ(process.num_starts(), 1);
  EXPECT_EQ(process.pid(), -1);
  EXPECT_TRUE(process.call(R"({"wait":false})")["good"]);
  EXPECT_EQ(process.num_starts(), 2);
}

TEST_F(TokenizerTest, AnErrorReplyAndAGarbledStreamAreErrors) {
  PythonProcess process(
      module("import os\n"
             "from tandem import pipe\n"
             "def answer(request):\n"
             "    if request['n'] == 1: raise ValueError('one is refused')\n"
             "    if request['n'] == 2: os.write(4, b'text that is no frame')\n"
             "    return {'n': request['n']}\n"
             "pipe.serve(answer)\n"));
  EXPECT_EQ(error_of([&] { process.call(R"({"n":1})"); }), "module: ValueError: one is refused");
  EXPECT_EQ(process.call(R"({"n":3})")["n"], 3);
  EXPECT_EQ(process.num_starts(), 1);
  EXPECT_NE(error_of([&] { process.call(R"({"n":2})"); }), "no error");
  EXPECT_EQ(process.call(R"({"n":3})")["n"], 3);  // a fresh process
  EXPECT_EQ(process.num_starts(), 2);
}

TEST_F(TokenizerTest, PromptsAreTemplatedTokenisedAndFiltered) {
  TokenizerProcess tokenizer(options());
  PromptFileOptions file;
  file.label_key = "label";
  file.apply_chat_template = true;
  file.path = write("rows.jsonl",
                    "{\"input\":\"hello\",\"label\":72057594038135102}\r\n"
                    "{\"input\":\"hello hello hello\",\"label\":\"x\"}\n"
                    "{\"input\":[{\"role\":\"user\",\"content\":\"world\"}],\"label\":\"y\"}");
  file.max_prompt_tokens = 4;
  const PromptSet set = load_prompts(file, tokenizer);
  EXPECT_EQ(set.summary(), "2 prompts (3 rows read, 0 bad, 1 over 4 tokens)");
  ASSERT_EQ(set.prompts.size(), 2u);
  EXPECT_EQ(set.prompts[0].text, "<user> hello <bot>");
  EXPECT_EQ(set.prompts[0].label, "72057594038135102");
  EXPECT_EQ(set.prompts[1].row, 2u);
  EXPECT_EQ(set.prompts[1].ids, (Ids{3, 2, 4}));

  file.max_prompt_tokens = 2;  // case C42: nothing left is a clear error
  const std::string text = error_of([&] { load_prompts(file, tokenizer); });
  EXPECT_TRUE(text.starts_with(file.path)) << text;
  EXPECT_NE(text.find("3 over 2 tokens); raise --rollout-max-prompt-len"), std::string::npos)
      << text;
}

// Case C42: 502 tokens by the template, 558 with the row's tools; the limit counts the latter.
TEST_F(TokenizerTest, TheLimitCountsTemplateAndTools) {
  TokenizerProcess tokenizer(options());
  std::string prompt = "hello", tool = "w";
  for (int i = 1; i < 500; ++i) prompt += " hello";
  for (int i = 1; i < 56; ++i) tool += " w";
  PromptFileOptions file;
  file.apply_chat_template = true;
  file.path = write("rows.jsonl", fmt::format("{{\"input\":\"{0}\"}}\n{{\"input\":\"{0}\","
                                              "\"tools\":[{{\"d\":\"{1}\"}}]}}\n",
                                              prompt, tool));
  file.max_prompt_tokens = 512;
  const PromptSet set = load_prompts(file, tokenizer);
  EXPECT_EQ(set.summary(), "1 prompts (2 rows read, 0 bad, 1 over 512 tokens)");
  EXPECT_EQ(set.prompts[0].ids.size(), 502u);
  file.max_prompt_tokens = 558;
  EXPECT_EQ(load_prompts(file, tokenizer).prompts[1].ids.size(), 558u);
}

TEST_F(TokenizerTest, PlainPromptsAndTemplateFaults) {
  TokenizerProcess tokenizer(options());
  PromptFileOptions file;
  file.path = write("rows.jsonl", "{\"input\":\"hello world\"}\n{\"input\":\" \"}\n");
  const std::string text = error_of([&] { load_prompts(file, tokenizer); });
  EXPECT_NE(text.find("rows.jsonl: line 2: the prompt has no tokens"), std::string::npos) << text;
  file.skip_bad_rows = true;
  const PromptSet set = load_prompts(file, tokenizer);
  ASSERT_EQ(set.prompts.size(), 1u);
  EXPECT_EQ(set.prompts[0].ids, (Ids{1, 2}));
  EXPECT_EQ(set.bad.size(), 1u);

  file.apply_chat_template = true;
  file.apply_chat_template_kwargs = "[]";
  EXPECT_TRUE(error_of([&] {
                load_prompts(file, tokenizer);
              }).starts_with("--apply-chat-template-kwargs: found an array"));
  file.apply_chat_template_kwargs = "{}";
  file.path = folder_ + "/rows.parquet";
  EXPECT_NE(error_of([&] { load_prompts(file, tokenizer); }).find("arquet"), std::string::npos);
}

}  // namespace
}  // namespace tandem

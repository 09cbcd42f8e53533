// A step's row of metrics. Every name is declared once with the way it is reduced, so that a value
// means the same however many samples, micro-batches or ranks it came from:
//   sum   counts: tokens, samples            max, min   extremes; times (over ranks: the slowest)
//   mean  Σ weight·value / Σ weight          last  settings such as the learning rate: equal on all
// A rank adds what it saw, the driver merges the ranks' rows; merging is associative. A name that
// is not declared is an error, so no metric exists without a reduction.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace tandem {

enum class Reduction { sum, mean, max, min, last };

struct Declaration {
  std::string name;  // "train/loss"; one '*' stands for any text: "eval/*", "eval/*/max"
  Reduction reduction;
  std::string help = {};
};

class Declarations {
 public:
  Declarations() = default;
  explicit Declarations(std::vector<Declaration> list);

  // Throws Error if the name is declared already.
  void declare(Declaration declaration);

  // The exact name, else the longest pattern that fits; throws Error for an undeclared name.
  Reduction reduction(std::string_view name) const;

  const std::vector<Declaration>& list() const { return list_; }

 private:
  std::vector<Declaration> list_;
};

class Row {
 public:
  // Keeps a reference: the declarations must outlive the row.
  explicit Row(const Declarations& declarations) : declarations_(&declarations) {}

  // Takes one observation into the metric. `weight` counts for means only.
  void add(std::string_view name, double value, double weight = 1.0);

  // Takes all observations of another row.
  void merge(const Row& other);

  bool has(std::string_view name) const;

  // The reduced value; NaN for an absent name and for a mean of weight 0.
  double value(std::string_view name) const;

  // Names in the order in which they were first added.
  std::vector<std::string> names() const;

  // {"name": value, …} in that order; values that are no finite numbers are null.
  OrderedJson to_json() const;

  // Between processes: keeps sums and weights, so that merging goes on at the other end.
  // from_wire throws Error naming `where` if the text is no row or holds an undeclared name.
  std::string to_wire() const;
  static Row from_wire(std::string_view text, const Declarations& declarations,
                       std::string_view where);

 private:
  struct Entry {
    std::string name;
    Reduction reduction;
    double value = 0;   // sum of value·weight for means
    double weight = 0;  // sum of weights for means, else the number of observations
  };

  Entry& entry(std::string_view name);
  const Entry* find(std::string_view name) const;
  static double reduced(const Entry& entry);
  static void take(Entry& into, double value, double weight);

  const Declarations* declarations_;
  std::vector<Entry> entries_;
};

}  // namespace tandem

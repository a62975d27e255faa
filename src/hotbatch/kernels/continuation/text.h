// Text in which the end of a context can be found, and what followed it there. The reference, and
// the explanation, is core/speculation/suffix_index.py; both yield the same, bit for bit.
//
// A table knows places in the text, no tokens: whether a place has the run that is looked for
// before it is read off the text. That makes twelve bytes a token and table.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace hotbatch {

constexpr int kLevels = 6;
constexpr int kLengths[kLevels] = {1, 2, 4, 8, 16, 32};  // of matches that are told apart
constexpr int kKeyed = 3;                                // of these, those with a table
constexpr int kMostPlaces = 16;                          // that are looked at, newest first
constexpr int kAgreements = 4;                           // sole, all, most, some
constexpr int32_t kBreak = -1;                           // stands between two texts

// Places before which the last kLengths[level] tokens of a context stand, the newest first.
struct TextMatch {
  int level = -1;
  int count = 0;
  int32_t places[kMostPlaces];
  const std::vector<int32_t>* text = nullptr;
};

// For runs of `order` tokens: the newest place after each, and from each the one before.
class RunTable {
 public:
  explicit RunTable(int order) : order_(order) {}

  int order() const { return order_; }
  int32_t earlier(int32_t place) const { return earlier_[place]; }
  void enter_nothing() { earlier_.push_back(-1); }
  // The run before `place`, which is the number of places entered so far.
  void enter(const int32_t* text, int32_t place);
  // The newest place after the run that ends before `end`; -1 if there is none.
  int32_t newest(const int32_t* text, const int32_t* end) const;

 private:
  size_t slot_of(const int32_t* text, const int32_t* end) const;
  void grow(const int32_t* text);

  int order_;
  size_t used_ = 0;
  std::vector<int32_t> slots_;    // open addressing; -1 where there is none
  std::vector<int32_t> earlier_;  // by place
};

class TextIndex {
 public:
  size_t size() const { return tokens_.size(); }
  void append(int32_t token);
  void break_off();
  // The longest match of a context's last `length` tokens, which end before `end`.
  TextMatch find(const int32_t* end, int length, int least_level) const;

 private:
  std::vector<int32_t> tokens_;
  RunTable tables_[kKeyed] = {RunTable(kLengths[0]), RunTable(kLengths[1]), RunTable(kLengths[2])};
  int run_ = 0;  // tokens since the last break, as far as they matter
};

// The last one to two times `generation` tokens: two indexes of which the younger grows.
class RecentText {
 public:
  explicit RecentText(int64_t generation);

  size_t size() const { return younger_->size() + (older_ ? older_->size() : 0); }
  void append(int32_t token);
  void break_off() { younger_->break_off(); }
  TextMatch find(const int32_t* end, int length, int least_level) const;

 private:
  size_t generation_;
  std::unique_ptr<TextIndex> younger_, older_;
};

struct NextToken {
  int32_t token;
  int level;
  int agreement;
};

// The likeliest next tokens, one after another, as long as there are any.
class Continuation {
 public:
  explicit Continuation(const TextMatch& match);
  bool next(NextToken* out);

 private:
  const std::vector<int32_t>& text_;
  int count_;
  int32_t places_[kMostPlaces];
  int depth_;
  int32_t offset_ = 0;
};

}  // namespace hotbatch

#include "continuation/text.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hotbatch {
namespace {

constexpr size_t kFirstSlots = 64;

uint64_t hash_of(const int32_t* end, int order) {
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  for (int back = order; back > 0; --back) {
    hash ^= static_cast<uint32_t>(end[-back]);
    hash *= 0xD6E8FEB86659FD93ull;
    hash ^= hash >> 32;
  }
  return hash;
}

bool same(const int32_t* one_end, const int32_t* other_end, int length) {
  return std::memcmp(one_end - length, other_end - length, sizeof(int32_t) * length) == 0;
}

int level_of(int depth) {
  int level = kLevels - 1;
  while (kLengths[level] > depth) --level;
  return level;
}

}  // namespace

size_t RunTable::slot_of(const int32_t* text, const int32_t* end) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash_of(end, order_) & mask;
  while (slots_[slot] >= 0 && !same(text + slots_[slot], end, order_)) slot = (slot + 1) & mask;
  return slot;
}

int32_t RunTable::newest(const int32_t* text, const int32_t* end) const {
  return slots_.empty() ? -1 : slots_[slot_of(text, end)];
}

void RunTable::enter(const int32_t* text, int32_t place) {
  if (2 * (used_ + 1) > slots_.size()) grow(text);
  const size_t slot = slot_of(text, text + place);
  used_ += slots_[slot] < 0;
  earlier_.push_back(slots_[slot]);
  slots_[slot] = place;
}

void RunTable::grow(const int32_t* text) {
  std::vector<int32_t> old(std::max(kFirstSlots, 4 * slots_.size()), -1);
  old.swap(slots_);
  const size_t mask = slots_.size() - 1;
  for (int32_t place : old) {
    if (place < 0) continue;
    size_t slot = hash_of(text + place, order_) & mask;
    while (slots_[slot] >= 0) slot = (slot + 1) & mask;
    slots_[slot] = place;
  }
}

void TextIndex::append(int32_t token) {
  const auto place = static_cast<int32_t>(tokens_.size());
  for (RunTable& table : tables_) {
    if (run_ < table.order()) {
      table.enter_nothing();
    } else {
      table.enter(tokens_.data(), place);
    }
  }
  tokens_.push_back(token);
  run_ = std::min(run_ + 1, kLengths[kKeyed - 1]);
}

void TextIndex::break_off() {
  if (run_ == 0) return;
  tokens_.push_back(kBreak);
  for (RunTable& table : tables_) table.enter_nothing();
  run_ = 0;
}

TextMatch TextIndex::find(const int32_t* end, int length, int least_level) const {
  TextMatch match;
  match.text = &tokens_;
  const int32_t* text = tokens_.data();
  for (int level = kKeyed - 1; level >= std::min(least_level, kKeyed - 1); --level) {
    const RunTable& table = tables_[level];
    if (length < table.order()) continue;
    int32_t place = table.newest(text, end);
    if (place < 0) continue;
    match.level = level;
    for (int looked = 0; looked < kMostPlaces && place >= 0; ++looked) {
      // Of the places after the longest run that has a table, those with the longest match.
      int reached = level;
      while (level == kKeyed - 1 && reached + 1 < kLevels) {
        const int wanted = kLengths[reached + 1];
        if (wanted > length || place < wanted || !same(text + place, end, wanted)) break;
        ++reached;
      }
      if (reached > match.level) {
        match.level = reached;
        match.count = 0;
      }
      if (reached == match.level) match.places[match.count++] = place;
      place = table.earlier(place);
    }
    break;
  }
  return match;
}

RecentText::RecentText(int64_t generation)
    : generation_(static_cast<size_t>(generation)), younger_(new TextIndex) {
  if (generation < 1) throw std::invalid_argument("a generation has at least one token");
}

void RecentText::append(int32_t token) {
  if (younger_->size() >= generation_) {
    older_ = std::move(younger_);
    younger_.reset(new TextIndex);
  }
  younger_->append(token);
}

TextMatch RecentText::find(const int32_t* end, int length, int least_level) const {
  TextMatch match = younger_->find(end, length, least_level);
  if (older_) {
    const TextMatch older = older_->find(end, length, least_level);
    if (older.level > match.level) return older;
  }
  return match;
}

Continuation::Continuation(const TextMatch& match)
    : text_(*match.text), count_(match.count), depth_(kLengths[match.level]) {
  std::copy(match.places, match.places + match.count, places_);
}

bool Continuation::next(NextToken* out) {
  const auto size = static_cast<int32_t>(text_.size());
  int32_t ahead[kMostPlaces];
  int count = 0;
  for (int index = 0; index < count_; ++index) {
    const int32_t place = places_[index] + offset_;
    if (place >= size) continue;
    ahead[count] = text_[place];
    // In step with the tokens: whoever ends here is no longer asked.
    places_[count++] = places_[index];
  }
  if (count == 0) return false;
  int32_t token = ahead[0];
  int votes = 0;
  for (int index = 0; index < count; ++index) {
    if (std::find(ahead, ahead + index, ahead[index]) != ahead + index) continue;
    const auto number = static_cast<int>(std::count(ahead + index, ahead + count, ahead[index]));
    if (number > votes) {
      votes = number;
      token = ahead[index];
    }
  }
  if (token == kBreak) return false;
  out->token = token;
  out->level = level_of(depth_);
  out->agreement = count == 1 ? 0 : votes == count ? 1 : 2 * votes > count ? 2 : 3;
  int kept = 0;
  for (int index = 0; index < count; ++index) {
    if (ahead[index] == token) places_[kept++] = places_[index];
  }
  count_ = kept;
  ++offset_;
  ++depth_;
  return true;
}

}  // namespace hotbatch

// Handlers of `jinfer_sample` (next tokens of sequences) and `jinfer_logprobs`.
#include "sample/sample.h"

#include <algorithm>
#include <cfloat>
#include <string>
#include <vector>

#include "common/buffer_checks.h"
#include "common/handler.h"
#include "common/parallel.h"
#include "rowwise/argmax.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

constexpr int64_t LOGITS_PER_THREAD = 1 << 14;  // that make another thread worthwhile

// The token of the greatest logit.
int32_t greedy_token(const Argmax& found, int64_t size) {
  return found.has_nan || found.value > FLT_MAX ? NOT_FINITE : index_of(found, size);
}

using Floats2 = ffi::BufferR2<ffi::F32>;
using Ints1 = ffi::BufferR1<ffi::S32>;
using Ints2 = ffi::BufferR2<ffi::S32>;

// Arrays with a row per request; for each row of logits its request (`owners`), and the row of
// `history` with its sequence (`slots`).
struct Batch {
  Floats2 logits, numbers;
  Ints2 counts;
  ffi::BufferR2<ffi::U32> key;
  Ints2 stages, ends, biased;
  Floats2 biases;
  ffi::BufferR3<ffi::S32> bad_words;
  Ints2 breakers;
  Ints1 drawn;
  ffi::BufferR1<ffi::F32> mu;
  Ints2 history;
  Ints1 lengths, prompts, owners, slots;
  const uint32_t* mask = nullptr;  // [requests, words]
  const bool* masked = nullptr;    // [requests]

  int64_t rows() const { return logits.dimensions()[0]; }
  int64_t vocab() const { return logits.dimensions()[1]; }
  int64_t words() const { return (vocab() + 31) / 32; }

  template <class Buffer>
  static Ids ids(const Buffer& buffer, int64_t row) {
    const int64_t count = buffer.element_count() / buffer.dimensions()[0];
    return {buffer.typed_data() + row * count, count};
  }

  Request request(int64_t row) const {
    const int64_t i = owners.typed_data()[row];
    Request request;
    request.numbers = numbers.typed_data() + i * NUMBERS;
    request.counts = counts.typed_data() + i * COUNTS;
    request.key = key.typed_data() + i * 2;
    request.stages = ids(stages, i).ids;
    request.ends = ids(ends, i);
    request.biased = ids(biased, i);
    request.breakers = ids(breakers, i);
    request.biases = biases.typed_data() + i * request.biased.count;
    request.bad_words = ids(bad_words, i);
    request.word = bad_words.dimensions()[2];
    request.history = {ids(history, slots.typed_data()[row]).ids, lengths.typed_data()[i]};
    request.prompt = prompts.typed_data()[i];
    request.drawn = drawn.typed_data()[i];
    request.mu = mu.typed_data()[i];
    request.mask = masked && masked[i] ? mask + i * words() : nullptr;
    return request;
  }

  // The first inconsistency found; nothing may be read then.
  const char* wrong() const {
    if (vocab() < 1 || vocab() > INT32_MAX) return "rows are empty or too long";
    const int64_t requests = numbers.dimensions()[0];
    if (!has_shape(numbers, {requests, NUMBERS}) || !has_shape(counts, {requests, COUNTS}) ||
        !has_shape(key, {requests, 2}) || !has_shape(stages, {requests, STAGES}))
      return "parameters are not those of this library";
    if (ends.dimensions()[0] != requests || biased.dimensions()[0] != requests ||
        breakers.dimensions()[0] != requests || bad_words.dimensions()[0] != requests ||
        !has_shape(biases, {requests, biased.dimensions()[1]}) || bad_words.dimensions()[2] < 1)
      return "lists of tokens do not fit the requests";
    if (!has_shape(drawn, {requests}) || !has_shape(mu, {requests}) ||
        !has_shape(lengths, {requests}) || !has_shape(prompts, {requests}))
      return "progress does not fit the requests";
    if (!has_shape(owners, {rows()}) || !has_shape(slots, {rows()}))
      return "there is not a request for each row";
    for (int64_t row = 0; row < rows(); ++row) {
      const int64_t i = owners.typed_data()[row], slot = slots.typed_data()[row];
      if (i < 0 || i >= requests || slot < 0 || slot >= history.dimensions()[0])
        return "a row is of a request that is not there";
      const int64_t length = lengths.typed_data()[i];
      if (length < 0 || length > history.dimensions()[1])
        return "a sequence is longer than its history";
    }
    return nullptr;
  }
};

// `filtered` has a row per row of logits, or none if not requested.
ffi::Error sample(ffi::ThreadPool pool, Floats2 logits, Floats2 numbers, Ints2 counts,
                  ffi::BufferR2<ffi::U32> key, Ints2 stages, Ints2 ends, Ints2 biased,
                  Floats2 biases, ffi::BufferR3<ffi::S32> bad_words, Ints2 breakers, Ints1 drawn,
                  ffi::BufferR1<ffi::F32> mu, Ints2 history, Ints1 lengths, Ints1 prompts,
                  Ints1 owners, Ints1 slots, ffi::RemainingArgs masks,
                  ffi::ResultBuffer<ffi::S32> tokens, ffi::ResultBuffer<ffi::F32> after,
                  ffi::ResultBuffer<ffi::F32> filtered) {
  Batch batch{logits,   numbers, counts, key,     stages,  ends,    biased, biases, bad_words,
              breakers, drawn,   mu,     history, lengths, prompts, owners, slots};
  if (const char* what = batch.wrong()) return refuse(what);
  const int64_t rows = batch.rows(), vocab = batch.vocab(), requests = numbers.dimensions()[0];
  if (!has_shape(*tokens, {rows}) || !has_shape(*after, {rows}) ||
      !(has_shape(*filtered, {rows, vocab}) || has_shape(*filtered, {0, vocab})))
    return refuse("the results are not one for each row");
  if (masks.size() != 0) {
    auto mask = masks.get<ffi::BufferR2<ffi::U32>>(0);
    auto masked = masks.get<ffi::BufferR1<ffi::PRED>>(1);
    if (mask.has_error() || masked.has_error() || masks.size() != 2 ||
        !has_shape(*mask, {requests, batch.words()}) || !has_shape(*masked, {requests}))
      return refuse("masks do not fit the requests");
    batch.mask = mask->typed_data();
    batch.masked = masked->typed_data();
  }
  const float* const x = logits.typed_data();
  float* const whole = filtered->dimensions()[0] > 0 ? filtered->typed_data() : nullptr;
  std::vector<Request> each;
  for (int64_t row = 0; row < rows; ++row) each.push_back(batch.request(row));
  // Several threads may share a single row's argmax.
  if (!whole && std::all_of(each.begin(), each.end(), is_greedy)) {
    argmax_rows(pool, x, rows, vocab, tokens->typed_data(), greedy_token);
    for (int64_t row = 0; row < rows; ++row) after->typed_data()[row] = each[row].mu;
    return ffi::Error::Success();
  }
  parallel_for(pool, rows, 1 + rows * vocab / LOGITS_PER_THREAD, [&](int64_t row) {
    const float* const row_logits = x + row * vocab;
    Sampled sampled{0, each[row].mu};
    if (!whole && is_greedy(each[row]))
      sampled.token = greedy_token(rowwise_kernels().argmax(row_logits, vocab), vocab);
    else
      sampled = sample_kernels().sample(row_logits, vocab, each[row],
                                        whole ? whole + row * vocab : nullptr);
    tokens->typed_data()[row] = sampled.token;
    after->typed_data()[row] = sampled.mu;
  });
  return ffi::Error::Success();
}

// Only for rows in `needed`; zeros for others.
ffi::Error logprobs(ffi::ThreadPool pool, Floats2 logits, Ints1 tokens,
                    ffi::BufferR1<ffi::PRED> needed, ffi::ResultBuffer<ffi::F32> logprob,
                    ffi::ResultBuffer<ffi::S32> ids, ffi::ResultBuffer<ffi::F32> top) {
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  const auto shape = top->dimensions();
  const int64_t count = shape.size() == 2 ? shape[1] : 0;
  if (vocab < 1 || vocab > INT32_MAX || count < 1 || count > vocab || !has_shape(tokens, {rows}) ||
      !has_shape(needed, {rows}) || !has_shape(*logprob, {rows}) ||
      !has_shape(*ids, {rows, count}) || !has_shape(*top, {rows, count}))
    return refuse("there is not one of each for each row");
  parallel_for(pool, rows, 1 + rows * vocab / LOGITS_PER_THREAD, [&](int64_t row) {
    int32_t* const to = ids->typed_data() + row * count;
    float* const values = top->typed_data() + row * count;
    float& first = logprob->typed_data()[row];
    if (!needed.typed_data()[row]) {
      first = 0;
      std::fill(to, to + count, 0);
      std::fill(values, values + count, 0.0f);
      return;
    }
    const int64_t token = std::clamp<int64_t>(tokens.typed_data()[row], 0, vocab - 1);
    first = sample_kernels().log_probabilities(logits.typed_data() + row * vocab, vocab,
                                               static_cast<int32_t>(token), count, to, values);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

#define JINFER_NAME(name, text) text " "

// The names of the numbers, of the counts and of the stages, a line each.
extern "C" __attribute__((visibility("default"))) const char* jinfer_sampler_layout() {
  return JINFER_SAMPLER_NUMBERS(JINFER_NAME) "\n" JINFER_SAMPLER_COUNTS(
      JINFER_NAME) "\n" JINFER_SAMPLER_STAGES(JINFER_NAME);
}

JINFER_HANDLER(jinfer_sample, jinfer::sample);
JINFER_HANDLER(jinfer_logprobs, jinfer::logprobs);

// XLA FFI handlers: adapts a C++ function to one. All share one signature towards XLA, whose
// headers generate much code for each distinct one.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jinfer {

template <class T>
constexpr bool is_buffer = false;
template <>
inline constexpr bool is_buffer<xla::ffi::AnyBuffer> = true;
template <xla::ffi::DataType type, size_t rank>
constexpr bool is_buffer<xla::ffi::Buffer<type, rank>> = true;
template <class T>
constexpr bool is_result = false;
template <class T>
constexpr bool is_result<xla::ffi::Result<T>> = true;

// Arguments of a handler, read in the order of a function's parameters: the thread pool, buffers as
// arguments or all remaining ones, buffers as results or all of them, and attributes by name.
class ArgReader {
 public:
  ArgReader(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
            xla::ffi::Dictionary attributes, const char* const* names)
      : pool_(pool), args_(args), rets_(rets), attributes_(attributes), names_(names) {}

  // Anything missing or of another type is recorded as the error.
  template <class T>
  T take() {
    if constexpr (std::is_same_v<T, xla::ffi::ThreadPool>) {
      return pool_;
    } else if constexpr (std::is_same_v<T, xla::ffi::RemainingArgs>) {
      const size_t from = std::min(std::exchange(arg_, args_.size()), args_.size());
      return RemainingFrom(args_).from(from);
    } else if constexpr (std::is_same_v<T, xla::ffi::RemainingRets>) {
      ret_ = rets_.size();
      return rets_;
    } else if constexpr (is_buffer<T>) {
      return value_or_error(args_.get<T>(arg_++), [] { return T(&empty_buffer()); });
    } else if constexpr (is_result<T>) {
      using Buffer = std::decay_t<decltype(*std::declval<T>())>;
      return value_or_error(rets_.get<Buffer>(ret_++), [] { return T(Buffer(&empty_buffer())); });
    } else {
      return value_or_error(attributes_.get<T>(names_[attribute_++]), [] { return T{}; });
    }
  }

  // The first error, or that something was not read.
  std::optional<xla::ffi::Error> error() const {
    if (error_) return error_;
    if (arg_ == args_.size() && ret_ == rets_.size() && attribute_ == attributes_.size()) return {};
    return xla::ffi::Error::InvalidArgument("another number of arguments, results or attributes");
  }

 private:
  struct RemainingFrom : xla::ffi::RemainingArgs {
    explicit RemainingFrom(const xla::ffi::RemainingArgs& all) : RemainingArgs(all) {}
    xla::ffi::RemainingArgs from(size_t first) const { return {args(), offset() + first}; }
  };

  static const XLA_FFI_Buffer& empty_buffer() {
    static const XLA_FFI_Buffer empty_buffer{};
    return empty_buffer;
  }

  template <class T, class Else>
  T value_or_error(xla::ffi::ErrorOr<T> value, Else otherwise) {
    if (value.has_value()) return *value;
    if (!error_) error_ = value.error();
    return otherwise();
  }

  xla::ffi::ThreadPool pool_;
  xla::ffi::RemainingArgs args_;
  xla::ffi::RemainingRets rets_;
  xla::ffi::Dictionary attributes_;
  const char* const* names_;
  size_t arg_ = 0, ret_ = 0, attribute_ = 0;
  std::optional<xla::ffi::Error> error_;
};

template <class T>
constexpr bool is_attribute =
    !is_buffer<T> && !is_result<T> && !std::is_same_v<T, xla::ffi::ThreadPool> &&
    !std::is_same_v<T, xla::ffi::RemainingArgs> && !std::is_same_v<T, xla::ffi::RemainingRets>;

template <size_t names, class... T>
xla::ffi::Error call_with(const char* symbol, xla::ffi::Error (*function)(T...), ArgReader reader) {
  static_assert(names == (size_t{0} + ... + is_attribute<T>), "not the attributes that it takes");
  const std::tuple<T...> all{reader.take<T>()...};
  std::optional<xla::ffi::Error> error = reader.error();
  if (!error) error = std::apply(function, all);
  if (error->success()) return *error;
  return xla::ffi::Error::InvalidArgument(std::string(symbol) + ": " + error->message());
}

inline auto binding() {
  return xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs();
}

}  // namespace jinfer

// Defines the handler `symbol` of a function; the names of its attributes follow, in order.
#define JINFER_HANDLER(symbol, function, ...)                                                  \
  static xla::ffi::Error symbol##_of(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs args,  \
                                     xla::ffi::RemainingRets rets, xla::ffi::Dictionary all) { \
    static constexpr const char* names[] = {nullptr, __VA_ARGS__};                             \
    return jinfer::call_with<std::size(names) - 1>(#symbol, function,                          \
                                                   {pool, args, rets, all, names + 1});        \
  }                                                                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, symbol##_of, jinfer::binding())

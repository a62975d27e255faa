// RMS norm of one row; see args.h.

inline void norm_row(const NormArgs& args, int row) {
  const float* x = args.input + row * args.input_stride;
  const int cols = args.output->cols;
  vf squares = zero();
  for (int k = 0; k < cols; k += kLanes) {
    const vf value = load_columns(x + k, cols - k);
    squares = fma(value, value, squares);
  }
  const float mean = sum(squares) / static_cast<float>(cols);
  const vf scale = set1(1.0f / std::sqrt(mean + args.eps));
  write_activation(*args.output, row, [&](int k) {
    return load_columns(x + k, cols - k) * scale * load_columns(args.weight + k, cols - k);
  });
}

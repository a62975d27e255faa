// SiLU(gate) * up, alone or at the end of the linear layer that makes both; see args.h.

// e^-gate as a power of two: half the work of exp, and a gate so large that its rounding shows
// has a sigmoid of 0 or 1. The bound keeps the power finite; NaN passes it.
inline vf silu_mul(vf gate, vf up) {
  const vf power = min(set1(126.0f), gate * set1(-1.44269504088896341f));
  return gate / (set1(1.0f) + exp2_near(power)) * up;
}

inline void silu_mul_rows(const SiluMulArgs& args, int begin, int end) {
  const int cols = args.output->cols;
  write_rows(*args.output, begin, end, 0, cols, [&](int row, int k) {
    const float* gate = args.input + row * args.input_stride + k;
    return silu_mul(load_columns(gate, cols - k), load_columns(gate + cols, cols - k));
  });
}

// Panels [first, first + kGatedPanels) of a gated layer for the rows [row_begin, row_end). The
// floats of a few rows stay in this core's cache between the product and the quantiser.
inline void gated_linear(const GatedArgs& args, int first, int row_begin, int row_end) {
  constexpr int kStride = kGatedPanels * kPanel;
  const int last = std::min(args.linear.weight->panels(), first + kGatedPanels);
  const int column_begin = first * kLanes, column_end = last * kLanes;
  for (int begin = row_begin; begin < row_end; begin += kGatedRows) {
    const int end = std::min(row_end, begin + kGatedRows);
    LinearArgs linear_args = args.linear;
    linear_args.output = args.scratch - (int64_t{begin} * kStride + first * kPanel);
    linear_args.output_stride = kStride;
    linear_args.residual = nullptr;
    for (int panel = first; panel < last; ++panel) {
      linear_args.next_panel = panel + 1 < last ? args.linear.weight->panel(panel + 1) : args.next_group;
      // A part of the lines beside each panel.
      for (int row = begin + panel - first; row < end; row += last - first)
        prefetch_columns(*args.output, row, column_begin, column_end);
      linear(linear_args, panel, begin, end);
    }
    write_rows(*args.output, begin, end, column_begin, column_end, [&](int row, int k) {
      const float* pair = args.scratch + (row - begin) * kStride + 2 * (k - column_begin);
      return silu_mul(load(pair), load(pair + kLanes));
    });
  }
}

inline void convert_rows(const ConvertArgs& args, int begin, int end) {
  const int cols = args.output->cols;
  write_rows(*args.output, begin, end, 0, cols, [&](int row, int k) {
    return load_columns(args.input + row * args.input_stride + k, cols - k);
  });
}

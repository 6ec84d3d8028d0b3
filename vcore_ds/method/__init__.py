"""The paper's mathematics on plain tensors, without recipe, engine or process groups.

Notation (docs/method.md maps equations to functions and tests):

| symbol | here | shape |
|---|---|---|
| `i` | a sequence of the batch; a token's sequence is `sequence_index` | `[N]` |
| `n_i` | `num_tokens`, supervised tokens of a sequence | `[num_sequences]` |
| `l[i,t]` | `losses`, nats, fp32 | `[N]` |
| `s[i,t]` | `utilities`, directional derivative of `l` along the probe direction | `[N]` |
| `b[i,t]` | base measure, uniform unless `log_base` is given | `[N]` |
| `q[i,t]` | `weights`, sum to 1 over a sequence | `[N]` |
| `tau` | `temperature`, multiplies utilities | `[num_sequences]` |
| `alpha` | `alpha`, variance-control factor | scalar |

Tensors over tokens are ragged: N counts the supervised tokens of all sequences of a micro-batch, in row-major order.
"""

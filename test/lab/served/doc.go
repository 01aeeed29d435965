// Package served has a model served by two lab machines: a node daemon in each, the prefill worker in one and the decode
// worker in the other, KV cache over soft RoCE. There is nothing to import here.
package served

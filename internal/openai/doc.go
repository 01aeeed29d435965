// Package openai is the OpenAI HTTP dialect as Headrace speaks it: request parsing and validation, error and response
// rendering, the incremental detokeniser with stop strings, and the event lines between router and worker.
//
// Everything in it is a pure function of its input: it opens nothing, knows no HTTP server, no engine and no model, so
// that router and worker agree on every byte.
package openai

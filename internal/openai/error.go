package openai

import (
	"fmt"
	"net/http"
	"time"
)

// Error types and codes as OpenAI's clients know them.
const (
	TypeInvalidRequest = "invalid_request_error"
	TypeServer         = "server_error"
	TypeRateLimit      = "rate_limit_error"

	CodeContextLength  = "context_length_exceeded"
	CodeModelNotFound  = "model_not_found"
	CodeInvalidAPIKey  = "invalid_api_key"
	CodeRateLimit      = "rate_limit_exceeded"
	CodeOverloaded     = "service_unavailable"
	CodeUnsupported    = "unsupported_parameter"
	CodeInvalidValue   = "invalid_value"
	CodeInvalidJSON    = "invalid_json"
	CodeBodyTooLarge   = "request_too_large"
	CodeNotFound       = "not_found"
	CodeMethod         = "method_not_allowed"
	CodeInternal       = "internal_error"
	CodeRequestTimeout = "timeout"
	CodeConflict       = "conflict"
)

// Error is an error a client sees, in OpenAI's shape. Param and Code are rendered as null when empty.
type Error struct {
	Status  int
	Message string
	Type    string
	Param   string
	Code    string
	// RetryAfter, when not zero, belongs in the Retry-After header.
	RetryAfter time.Duration
}

func (e *Error) Error() string { return e.Message }

// AppendJSON appends the response body {"error":{...}}.
func (e *Error) AppendJSON(dst []byte) []byte {
	dst = append(dst, `{"error":{"message":`...)
	dst = AppendString(dst, e.Message)
	dst = append(dst, `,"type":`...)
	dst = AppendString(dst, e.Type)
	dst = append(dst, `,"param":`...)
	dst = appendStringOrNull(dst, e.Param)
	dst = append(dst, `,"code":`...)
	dst = appendStringOrNull(dst, e.Code)
	return append(dst, "}}"...)
}

// AppendEvent appends the error as an event of a stream that has already begun, where no status can be sent any more.
func (e *Error) AppendEvent(dst []byte) []byte {
	dst = append(dst, "data: "...)
	dst = e.AppendJSON(dst)
	return append(dst, "\n\n"...)
}

// BadRequest is a 400 about one parameter (which may be empty).
func BadRequest(param, code, format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Type: TypeInvalidRequest, Param: param, Code: code, Message: fmt.Sprintf(format, args...)}
}

// Unsupported is the 400 for a parameter that is known and not offered.
func Unsupported(param, format string, args ...any) *Error {
	return BadRequest(param, CodeUnsupported, format, args...)
}

// ContextLength is the 400 for a prompt that does not fit the model, alone (maxTokens 0) or together with max_tokens.
func ContextLength(ep Endpoint, limit, prompt, maxTokens int) *Error {
	if maxTokens <= 0 || prompt >= limit {
		param := "messages"
		if ep == Completions {
			param = "prompt"
		}
		return BadRequest(param, CodeContextLength,
			"This model's maximum context length is %d tokens. However, your prompt has at least %d tokens. Please shorten it.", limit, prompt)
	}
	return BadRequest("max_tokens", CodeContextLength,
		"This model's maximum context length is %d tokens. However, you requested %d tokens (%d in the prompt, %d in the completion). Please reduce either.",
		limit, prompt+maxTokens, prompt, maxTokens)
}

// ModelNotFound is the 404 for a model nobody serves.
func ModelNotFound(model string) *Error {
	return &Error{Status: http.StatusNotFound, Type: TypeInvalidRequest, Param: "model", Code: CodeModelNotFound,
		Message: fmt.Sprintf("The model %q does not exist or you do not have access to it.", model)}
}

// InvalidAPIKey is the 401.
func InvalidAPIKey() *Error {
	return &Error{Status: http.StatusUnauthorized, Type: TypeInvalidRequest, Code: CodeInvalidAPIKey,
		Message: "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY'."}
}

// TooManyRequests is the 429.
func TooManyRequests(retryAfter time.Duration, format string, args ...any) *Error {
	return &Error{Status: http.StatusTooManyRequests, Type: TypeRateLimit, Code: CodeRateLimit, RetryAfter: retryAfter, Message: fmt.Sprintf(format, args...)}
}

// Unavailable is the 503: busy or unable now, another worker or a later attempt may serve it.
func Unavailable(format string, args ...any) *Error {
	return &Error{Status: http.StatusServiceUnavailable, Type: TypeServer, Code: CodeOverloaded, RetryAfter: time.Second, Message: fmt.Sprintf(format, args...)}
}

// Internal is the 500.
func Internal(format string, args ...any) *Error {
	return &Error{Status: http.StatusInternalServerError, Type: TypeServer, Code: CodeInternal, Message: fmt.Sprintf(format, args...)}
}

// Timeout is the 504.
func Timeout(format string, args ...any) *Error {
	return &Error{Status: http.StatusGatewayTimeout, Type: TypeServer, Code: CodeRequestTimeout, Message: fmt.Sprintf(format, args...)}
}

// TooLarge is the 413 for a body over the limit.
func TooLarge(limit int64) *Error {
	return &Error{Status: http.StatusRequestEntityTooLarge, Type: TypeInvalidRequest, Code: CodeBodyTooLarge,
		Message: fmt.Sprintf("The request body is over the limit of %d bytes.", limit)}
}

// NotFound is the 404 for an unknown path.
func NotFound(method, path string) *Error {
	return &Error{Status: http.StatusNotFound, Type: TypeInvalidRequest, Code: CodeNotFound, Message: fmt.Sprintf("Unknown request URL: %s %s.", method, path)}
}

// MethodNotAllowed is the 405.
func MethodNotAllowed(method, path string) *Error {
	return &Error{Status: http.StatusMethodNotAllowed, Type: TypeInvalidRequest, Code: CodeMethod, Message: fmt.Sprintf("Not allowed to %s on %s.", method, path)}
}

// Conflict is the 409 for what cannot be done in the state that things are in.
func Conflict(format string, args ...any) *Error {
	return &Error{Status: http.StatusConflict, Type: TypeInvalidRequest, Code: CodeConflict, Message: fmt.Sprintf(format, args...)}
}

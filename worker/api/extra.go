package api

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/openai"
)

// tokenize is vLLM's /tokenize: {"prompt": ...} or {"messages": ...} to token ids.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	body, e := s.readBody(w, r)
	if e != nil {
		writeError(w, e)
		return
	}
	req, e := openai.ParseRequest(openai.Completions, body, openai.Options{})
	if e != nil && e.Param == "prompt" {
		if chat, e2 := openai.ParseRequest(openai.Chat, body, openai.Options{}); e2 == nil {
			req, e = chat, nil
		}
	}
	if e != nil {
		writeError(w, e)
		return
	}
	ids, e := s.promptTokens(req, time.Now())
	if e != nil {
		writeError(w, e)
		return
	}
	out := append([]byte(nil), `{"count":`...)
	out = strconv.AppendInt(out, int64(len(ids)), 10)
	out = append(out, `,"max_model_len":`...)
	out = strconv.AppendInt(out, int64(s.model.Context), 10)
	out = append(out, `,"tokens":[`...)
	for i, id := range ids {
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendInt(out, int64(id), 10)
	}
	writeJSON(w, http.StatusOK, append(out, "]}"...))
}

// detokenize is vLLM's /detokenize: {"tokens": [...]} to text.
func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) {
	body, e := s.readBody(w, r)
	if e != nil {
		writeError(w, e)
		return
	}
	var in struct {
		Tokens []int32 `json:"tokens"`
	}
	if err := json.Unmarshal(body, &in); err != nil {
		writeError(w, openai.BadRequest("tokens", openai.CodeInvalidValue, "Invalid value for 'tokens': %v.", err))
		return
	}
	text := string(s.cfg.Tokenizer.Decode(nil, in.Tokens, true))
	out := append([]byte(nil), `{"prompt":`...)
	out = openai.AppendString(out, strings.ToValidUTF8(text, "\uFFFD"))
	writeJSON(w, http.StatusOK, append(out, '}'))
}

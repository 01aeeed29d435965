package chat

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
	"github.com/nikolalohinski/gonja/v2/nodes"
	"github.com/nikolalohinski/gonja/v2/parser"
	"github.com/nikolalohinski/gonja/v2/tokens"
)

// rangeMax bounds range(), which a template may call with numbers of its own.
const rangeMax = 100_000

// compile parses a template as transformers does: trim_blocks, lstrip_blocks, loop controls.
func compile(source string) (t *exec.Template, err error) {
	defer func() {
		if p := recover(); p != nil {
			t, err = nil, fmt.Errorf("parse: %v", p)
		}
	}()
	c := config.New()
	c.TrimBlocks, c.LeftStripBlocks = true, true
	return exec.NewTemplate(templateName, c, onlyThis(source), environment())
}

const templateName = "chat_template"

// onlyThis is a loader that knows one template and no files.
type onlyThis string

var _ loaders.Loader = onlyThis("")

func (l onlyThis) Read(path string) (io.Reader, error) {
	if path != templateName {
		return nil, errors.New("a chat template cannot load others")
	}
	return strings.NewReader(string(l)), nil
}

func (l onlyThis) Resolve(path string) (string, error) {
	if path != templateName {
		return "", errors.New("a chat template cannot load others")
	}
	return path, nil
}

func (l onlyThis) Inherit(string) (loaders.Loader, error) { return l, nil }

// statements are those of the library that stay within the template; extends, include, import and from are not among
// them, nor is what chat templates have no use for.
var statements = []string{"for", "if", "set", "macro", "raw", "with", "filter", "call", "break", "continue", "do"}

func environment() *exec.Environment {
	parsers := map[string]parser.ControlStructureParser{"generation": parseGeneration}
	for _, name := range statements {
		if p, ok := builtins.ControlStructures.Get(name); ok {
			parsers[name] = p
		}
	}
	filters := exec.NewFilterSet(map[string]exec.FilterFunction{}).Update(builtins.Filters)
	_ = filters.Replace("tojson", filterToJSON)
	methods := builtins.Methods
	methods.Dict = exec.NewMethodSet(dictMethods)
	namespace, _ := builtins.GlobalFunctions.Get("namespace")
	dict, _ := builtins.GlobalFunctions.Get("dict")
	return &exec.Environment{
		Filters:           filters,
		Tests:             builtins.Tests,
		ControlStructures: exec.NewControlStructureSet(parsers),
		Methods:           methods,
		Context: exec.NewContext(map[string]any{
			"namespace": namespace,
			"dict":      dict,
			"range":     rangeList,
		}),
	}
}

// rangeList is range() as a list: the library's own leaks a goroutine when a loop over it is left early.
func rangeList(_ *exec.Evaluator, params *exec.VarArgs) (list, error) {
	var args []int
	for _, a := range params.Args {
		if !a.IsInteger() {
			return nil, errors.New("range takes integers")
		}
		args = append(args, a.Integer())
	}
	start, stop, step := 0, 0, 1
	switch len(args) {
	case 1:
		stop = args[0]
	case 2:
		start, stop = args[0], args[1]
	case 3:
		start, stop, step = args[0], args[1], args[2]
	default:
		return nil, errors.New("range takes one to three integers")
	}
	if step == 0 {
		return nil, errors.New("range needs a step other than 0")
	}
	out := list{}
	for i := start; (step > 0 && i < stop) || (step < 0 && i > stop); i += step {
		if len(out) >= rangeMax {
			return nil, fmt.Errorf("range is over %d long", rangeMax)
		}
		out = append(out, i)
	}
	return out, nil
}

// generation is transformers' {% generation %}, which marks what a model said for training and prints its body.
type generation struct {
	at   *tokens.Token
	body *nodes.Wrapper
}

func (g *generation) Position() *tokens.Token { return g.at }
func (g *generation) String() string          { return "generation" }

// Execute implements exec.ControlStructure.
func (g *generation) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	return r.ExecuteWrapper(g.body)
}

func parseGeneration(p, args *parser.Parser) (nodes.ControlStructure, error) {
	g := &generation{at: p.Current()}
	body, end, err := p.WrapUntil("endgeneration")
	if err != nil {
		return nil, err
	}
	if !args.End() || !end.End() {
		return nil, args.Error("generation takes no arguments", nil)
	}
	g.body = body
	return g, nil
}

// dictMethods are a dict's methods that read, in the order of the dict. The library's own sort the keys, and would let
// a template change what it was given.
var dictMethods = map[string]exec.Method[map[string]any]{
	"get": func(self map[string]any, selfValue *exec.Value, args *exec.VarArgs) (any, error) {
		if len(args.Args) < 1 || len(args.Args) > 2 {
			return nil, exec.ErrInvalidCall(errors.New("get takes one or two arguments"))
		}
		if v, ok := self[args.Args[0].String()]; ok {
			if d, isDict := selfValue.Interface().(*exec.Dict); isDict {
				return d.Get(args.Args[0]).Interface(), nil
			}
			return v, nil
		}
		if len(args.Args) == 2 {
			return args.Args[1].Interface(), nil
		}
		return nil, nil
	},
	"items": func(_ map[string]any, selfValue *exec.Value, _ *exec.VarArgs) (any, error) {
		out := list{}
		each(selfValue, func(k string, v any) { out = append(out, list{k, v}) })
		return out, nil
	},
	"keys": func(_ map[string]any, selfValue *exec.Value, _ *exec.VarArgs) (any, error) {
		out := list{}
		each(selfValue, func(k string, _ any) { out = append(out, k) })
		return out, nil
	},
	"values": func(_ map[string]any, selfValue *exec.Value, _ *exec.VarArgs) (any, error) {
		out := list{}
		each(selfValue, func(_ string, v any) { out = append(out, v) })
		return out, nil
	},
}

// each calls f for the members of a dict: in its own order, or that of the keys where it has none.
func each(v *exec.Value, f func(key string, value any)) {
	v.IterateOrder(func(_, _ int, key, value *exec.Value) bool {
		f(key.String(), value.Interface())
		return true
	}, func() {}, false, v.Val.Kind().String() == "map", true)
}

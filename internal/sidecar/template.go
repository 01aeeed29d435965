package sidecar

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Dialects: how a router talks to an engine.
const (
	DialectVLLM         = "vllm"           // vLLM with Headrace's connector
	DialectVLLMNixl     = "vllm-nixl"      // vLLM with its own NixlConnector
	DialectVLLMNixlPush = "vllm-nixl-push" // with its NixlPushConnector
	DialectVLLMMooncake = "vllm-mooncake"  // with its MooncakeConnector
	DialectVLLMNCCL     = "vllm-p2p-nccl"  // with its P2pNcclConnector
	DialectSGLang       = "sglang"         // SGLang in prefill or decode mode
	DialectOpenAI       = "openai"         // whole requests only
	DialectNative       = "native"         // Headrace's own
)

// Foreign are the dialects of engines that are not our own.
var Foreign = []string{DialectVLLM, DialectVLLMNixl, DialectVLLMNixlPush, DialectVLLMMooncake, DialectVLLMNCCL, DialectSGLang, DialectOpenAI}

// Template is a command line that starts an engine, with placeholders in it.
type Template struct {
	Name    string
	Dialect string
	Env     []string // NAME=value
	Words   []string
}

// ParseTemplate reads a template that a user gave: variables may stand before the command, as in a shell.
func ParseTemplate(line string) (*Template, error) {
	words, err := SplitWords(line)
	if err != nil {
		return nil, err
	}
	t := &Template{Name: "command", Dialect: DialectOpenAI}
	for len(words) > 0 && assignment.MatchString(words[0]) {
		t.Env, words = append(t.Env, words[0]), words[1:]
	}
	if len(words) == 0 {
		return nil, errors.New("it names no program to start")
	}
	t.Words = words
	return t, t.check()
}

// check finds placeholders that do not exist before anything is started.
func (t *Template) check() error {
	for _, s := range slices.Concat(t.Env, t.Words) {
		if _, err := expand(s, func(name string) (string, error) { return "", knownPlaceholder(name) }); err != nil {
			return err
		}
	}
	return nil
}

// placeholders are those that there are.
var placeholders = map[string]string{
	"model": "", "model-name": "", "host": "", "port": "", "role": "", "kv-role": "", "engine-id": "", "socket": "", "node": "",
	"gpus": "", "python": "", "bind-host": "", "threads": "",
}

func knownPlaceholder(name string) error {
	if _, ok := placeholders[name]; ok {
		return nil
	}
	if base, of, ok := strings.Cut(name, ":"); ok && base == "port" && of != "" {
		return nil
	}
	names := slices.Sorted(maps.Keys(placeholders))
	return fmt.Errorf("{%s} is no placeholder; there are {%s} and {port:NAME} for further free ports", name, strings.Join(names, "}, {"))
}

// Values are what the placeholders stand for.
type Values struct {
	Model     string
	ModelName string
	Host      string
	Port      int
	Role      string
	EngineID  string
	Socket    string
	Node      string
	GPUs      string
	Python    string
	Threads   int
	// Ports are those that {port:NAME} got.
	Ports map[string]int
	// FreePort finds one more; nil takes one that the kernel has to spare on Host.
	FreePort func() (int, error)
}

// Command is an expanded template.
type Command struct {
	Words []string
	Env   []string
}

// Line writes the command as one may paste it into a shell.
func (c *Command) Line() string {
	var line []string
	for _, e := range c.Env { // a shell takes 'NAME=x' in quotes for a program's name
		name, value, _ := strings.Cut(e, "=")
		if value = JoinWords([]string{value}); value == "''" {
			value = ""
		}
		line = append(line, name+"="+value)
	}
	return strings.Join(append(line, JoinWords(c.Words)), " ")
}

// Expand puts values into the template. It adds the ports it takes to v.Ports.
func (t *Template) Expand(v *Values) (*Command, error) {
	if v.Ports == nil {
		v.Ports = map[string]int{}
	}
	c := &Command{}
	for _, s := range t.Env {
		e, err := expand(s, v.lookup)
		if err != nil {
			return nil, err
		}
		c.Env = append(c.Env, e)
	}
	for _, s := range t.Words {
		w, err := expand(s, v.lookup)
		if err != nil {
			return nil, err
		}
		c.Words = append(c.Words, w)
	}
	return c, nil
}

func (v *Values) lookup(name string) (string, error) {
	if err := knownPlaceholder(name); err != nil {
		return "", err
	}
	value, flag := "", ""
	switch name {
	case "model":
		value, flag = v.Model, "--model"
	case "model-name":
		value = v.ModelName
	case "host":
		value = v.Host
	case "port":
		return strconv.Itoa(v.Port), nil
	case "threads":
		return strconv.Itoa(max(1, v.Threads)), nil
	case "bind-host":
		value = bindHost(v.Host)
	case "role":
		value = v.Role
	case "kv-role":
		value = map[string]string{"prefill": "kv_producer", "decode": "kv_consumer"}[v.Role]
		if value == "" {
			value = "kv_both"
		}
	case "engine-id":
		value = v.EngineID
	case "socket":
		value, flag = v.Socket, "--socket"
	case "node":
		value, flag = v.Node, "--node"
	case "gpus":
		value = v.GPUs
	case "python":
		value, flag = v.Python, "--python"
	default: // port:NAME
		return v.port(strings.TrimPrefix(name, "port:"))
	}
	if value == "" && flag != "" {
		return "", fmt.Errorf("the command has {%s}: %s is needed", name, flag)
	}
	return value, nil
}

func (v *Values) port(name string) (string, error) {
	if v.Ports[name] == 0 {
		free := v.FreePort
		if free == nil {
			free = func() (int, error) { return FreePort(v.Host) }
		}
		port, err := free()
		if err != nil {
			return "", err
		}
		v.Ports[name] = port
	}
	return strconv.Itoa(v.Ports[name]), nil
}

// bindHost writes a host for vLLM's publisher of KV events, which listens on an address with * or :: in it and dials any
// other. An IPv4 address in its IPv6 clothes is listened on as what it is, so that loopback stays loopback.
func bindHost(host string) string {
	if ip := net.ParseIP(host); ip != nil && ip.To4() != nil && !ip.IsUnspecified() {
		return "[::ffff:" + ip.To4().String() + "]"
	}
	return "*"
}

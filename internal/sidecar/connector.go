package sidecar

import (
	"cmp"
	"encoding/json"
	"net"
	"strconv"
	"strings"
)

// Where connectors are found when nobody says otherwise.
const (
	portNixl     = 5600 // NIXL's side channel
	portMooncake = 8998
	portSGLang   = 8998
)

// Connector is how an engine exchanges KV cache with others, as far as it is known. What is not is "" or 0.
type Connector struct {
	Dialect string
	Role    string
	// Host and Port are where other engines find it; "" is the engine's own host. Port is 0 where nobody needs one.
	Host string
	Port int
	// Engine is what other engines call it.
	Engine           string
	TensorParallel   uint32
	PipelineParallel uint32
}

// connectors are the dialects of vLLM's connectors, by their classes.
var connectors = map[string]string{
	"HeadraceConnector": DialectVLLM,
	"NixlConnector":     DialectVLLMNixl,
	"NixlPullConnector": DialectVLLMNixl,
	"NixlPushConnector": DialectVLLMNixlPush,
	"MooncakeConnector": DialectVLLMMooncake,
	"P2pNcclConnector":  DialectVLLMNCCL,
}

// transferConfig is vLLM's kv_transfer_config.
type transferConfig struct {
	Connector string `json:"kv_connector"`
	Role      string `json:"kv_role"`
	EngineID  string `json:"engine_id"`
	IP        string `json:"kv_ip"`
	Port      any    `json:"kv_port"` // a number, or one in quotes
	Extra     struct {
		Connectors []transferConfig `json:"connectors"` // MultiConnector's
	} `json:"kv_connector_extra_config"`
}

// of is the connector that the configuration names, of several the first one that a router can speak with.
func (t *transferConfig) of(env func(string) string) Connector {
	c := Connector{Dialect: connectors[t.Connector], Engine: t.EngineID, Role: map[string]string{"kv_producer": "prefill", "kv_consumer": "decode"}[t.Role]}
	for i := range t.Extra.Connectors {
		if c.Dialect != "" {
			break
		}
		if one := t.Extra.Connectors[i].of(env); one.Dialect != "" {
			one.Engine, one.Role = cmp.Or(one.Engine, c.Engine), cmp.Or(one.Role, c.Role)
			return one
		}
	}
	switch c.Dialect {
	case DialectVLLMNixlPush:
		c.Host, c.Port = env("VLLM_NIXL_SIDE_CHANNEL_HOST"), port(env("VLLM_NIXL_SIDE_CHANNEL_PORT"), portNixl)
	case DialectVLLMMooncake:
		c.Port = port(env("VLLM_MOONCAKE_BOOTSTRAP_PORT"), portMooncake)
	case DialectVLLMNCCL:
		c.Host = t.IP
		switch p := t.Port.(type) {
		case float64:
			c.Port = port(strconv.FormatFloat(p, 'f', -1, 64), 0)
		case string:
			c.Port = port(p, 0)
		}
	}
	if ip := net.ParseIP(c.Host); ip != nil && ip.IsUnspecified() {
		c.Host = ""
	}
	return c
}

// port reads a port; what is none is the other one.
func port(text string, other int) int {
	if n, err := strconv.Atoi(text); err == nil && n > 0 && n < 65536 {
		return n
	}
	return other
}

// ConnectorOf reads a command line as vLLM and SGLang do, and the variables that go with it.
func ConnectorOf(cmd *Command) Connector {
	env := func(name string) string {
		value := ""
		for _, e := range cmd.Env {
			if n, v, _ := strings.Cut(e, "="); n == name {
				value = v
			}
		}
		return value
	}
	var t transferConfig
	var c Connector
	disaggregates, bootstrap := "", ""
	for i, word := range cmd.Words {
		name, value, joined := strings.Cut(word, "=")
		if !strings.HasPrefix(name, "--") {
			continue
		}
		if !joined && i+1 < len(cmd.Words) {
			value = cmd.Words[i+1]
		}
		switch strings.ReplaceAll(name, "_", "-") {
		case "--kv-transfer-config":
			_ = json.Unmarshal([]byte(value), &t) // the engine will say what is wrong with it
		case "--kv-transfer-config.kv-connector":
			t.Connector = value
		case "--kv-transfer-config.kv-role":
			t.Role = value
		case "--kv-transfer-config.engine-id":
			t.EngineID = value
		case "--kv-transfer-config.kv-ip":
			t.IP = value
		case "--kv-transfer-config.kv-port":
			t.Port = value
		case "--disaggregation-mode":
			disaggregates = value
		case "--disaggregation-bootstrap-port":
			bootstrap = value
		case "--tensor-parallel-size", "--tp-size", "--tp":
			c.TensorParallel = number(value)
		case "--pipeline-parallel-size", "--pp-size", "--pp":
			c.PipelineParallel = number(value)
		}
	}
	tp, pp := c.TensorParallel, c.PipelineParallel
	if c = t.of(env); disaggregates != "" {
		c = sglangConnector(disaggregates, port(bootstrap, portSGLang))
	}
	c.TensorParallel, c.PipelineParallel = tp, pp
	return c
}

// sglangConnector is that of an SGLang in a mode; in neither it serves whole requests.
func sglangConnector(mode string, bootstrap int) Connector {
	switch mode {
	case "prefill":
		return Connector{Dialect: DialectSGLang, Role: mode, Port: bootstrap}
	case "decode":
		return Connector{Dialect: DialectSGLang, Role: mode}
	}
	return Connector{Dialect: DialectOpenAI}
}

// byItself tells whether a dialect's engines exchange KV cache by a connector of their own, so that equals may be paired.
func byItself(dialect string) bool {
	switch dialect {
	case DialectVLLMNixl, DialectVLLMNixlPush, DialectVLLMMooncake, DialectVLLMNCCL, DialectSGLang:
		return true
	}
	return false
}

// leases tells whether a dialect's engines keep blocks behind their answers, until others have fetched them.
func leases(dialect string) bool {
	return dialect == DialectVLLMNixl || dialect == DialectVLLMNixlPush || dialect == DialectVLLMMooncake
}

// missing says what a router must know of the engine before it pairs it, and does not.
func (c *Connector) missing(role string) string {
	prefills, decodes := role != "decode", role != "prefill"
	switch {
	case c.Port == 0 && c.Dialect == DialectVLLMNCCL,
		c.Port == 0 && prefills && (c.Dialect == DialectVLLMNixlPush || c.Dialect == DialectVLLMMooncake || c.Dialect == DialectSGLang && !decodes):
		return "where its peers find its connector: --kv-address HOST:PORT"
	case c.Engine == "" && prefills && c.Dialect == DialectVLLMNixlPush:
		return `what its peers call it: --kv-engine ID, or "engine_id":"ID" in its --kv-transfer-config`
	}
	return ""
}

// address is where the connector is found, of an engine at addr; "" where nobody needs to know.
func (c *Connector) address(addr string) string {
	if c.Port == 0 {
		return ""
	}
	host := c.Host
	if host == "" {
		host, _, _ = net.SplitHostPort(addr)
	}
	return net.JoinHostPort(host, strconv.Itoa(c.Port))
}

// Over takes what c does not know from o.
func (c Connector) Over(o Connector) Connector {
	if c.Dialect != "" && o.Dialect != "" && c.Dialect != o.Dialect {
		o.Host, o.Port, o.Engine, o.Role = "", 0, "", "" // it is about something else
	}
	if c.Port == 0 {
		c.Host, c.Port = o.Host, o.Port
	}
	c.Dialect, c.Role, c.Engine = cmp.Or(c.Dialect, o.Dialect), cmp.Or(c.Role, o.Role), cmp.Or(c.Engine, o.Engine)
	c.TensorParallel, c.PipelineParallel = cmp.Or(c.TensorParallel, o.TensorParallel), cmp.Or(c.PipelineParallel, o.PipelineParallel)
	return c
}

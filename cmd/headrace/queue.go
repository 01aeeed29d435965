package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/router"
)

// queueFlags are the router's flags about requests that wait, as far as they are not settings as they stand.
type queueFlags struct {
	bytes   config.Size
	held    config.Size
	aging   time.Duration
	weights []string
}

func (q *queueFlags) add(fs *pflag.FlagSet, cfg *router.Config) {
	fs.Var(&q.bytes, "max-queue-bytes", "bodies of the requests waiting, as 256MiB; what is beyond is refused with 429 (default 256MiB, or one body)")
	fs.Var(&q.held, "max-held-bytes", "bodies of all requests being read, waiting or served, as 4GiB; what is beyond is refused with 429 (default 1GiB, or one body)")
	fs.DurationVar(&cfg.QueueTimeout, "queue-timeout", 0, "longest that a request waits for its turn, then it gets 503 (0: as long as it may take)")
	fs.DurationVar(&q.aging, "priority-aging", 10*time.Second, "how much longer a request must have waited than one of a priority less by 1 to come before it (0: it never does)")
	fs.StringVar(&cfg.PriorityHeader, "priority-header", "", "`header` that overrides the body's priority; name one only if a proxy in front keeps clients from setting it")
	fs.StringVar(&cfg.TenantHeader, "tenant-header", "", "`header` that says whose share of the places a request takes (default: its API key's); only if a proxy sets it")
	fs.StringArrayVar(&q.weights, "tenant-weight", nil, "`NAME=WEIGHT` of a tenant's share while requests wait, 1 for others; NAME as in --tenant-header, or of an API key; may be repeated")
	fs.StringVar(&cfg.TimeoutHeader, "timeout-header", "X-Request-Timeout", "`header` in which clients may ask for less than --request-timeout (-: none)")
}

// apply puts what was given into the configuration.
func (q *queueFlags) apply(cfg *router.Config) error {
	cfg.MaxQueueBytes, cfg.MaxHeldBytes = int64(q.bytes), int64(q.held)
	switch {
	case q.aging < 0:
		return fmt.Errorf("--priority-aging %s is negative; 0 is for never", q.aging)
	case q.aging == 0:
		q.aging = -1
	}
	cfg.PriorityAging = q.aging
	for _, item := range q.weights {
		i := strings.LastIndexByte(item, '=')
		if i <= 0 {
			return fmt.Errorf("--tenant-weight %q: use NAME=WEIGHT", item)
		}
		w, err := strconv.ParseFloat(item[i+1:], 64)
		if err != nil {
			return fmt.Errorf("--tenant-weight %q: %q is no number", item, item[i+1:])
		}
		if cfg.TenantWeights == nil {
			cfg.TenantWeights = map[string]float64{}
		}
		if _, twice := cfg.TenantWeights[item[:i]]; twice {
			return fmt.Errorf("--tenant-weight %q: %q has a weight already", item, item[:i])
		}
		cfg.TenantWeights[item[:i]] = w
	}
	return nil
}

package status

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// decisionsShown are the latest of a planner's that people are shown; the JSON document has all.
const decisionsShown = 5

// Planner is a listed planner.
type Planner struct {
	registry.Planner
	Status *PlannerStatus `json:"status,omitempty"`
	Error  string         `json:"error,omitempty"`
}

// Engines are numbers of engines by what they do.
type Engines struct {
	Prefill int `json:"prefill"`
	Decode  int `json:"decode"`
	Whole   int `json:"whole,omitempty"`
}

func (e Engines) String() string {
	if e.Whole > 0 {
		return fmt.Sprint(e.Whole)
	}
	return fmt.Sprintf("%dP+%dD", e.Prefill, e.Decode)
}

// PlannerStatus is what is shown of a planner's /status.
type PlannerStatus struct {
	Leader    bool   `json:"leader"`
	Planner   string `json:"planner"`
	Connector string `json:"connector"`
	DryRun    bool   `json:"dry_run,omitempty"`
	Limits    struct {
		MinGPUs int `json:"min_gpus"`
		MaxGPUs int `json:"max_gpus"`
	} `json:"limits"`
	Problem string `json:"problem,omitempty"`
	// Measured is what it was told of steps and transfers.
	Measured struct {
		PrefillSteps   int     `json:"prefill_steps"`
		DecodeSteps    int     `json:"decode_steps"`
		TransferTokens int64   `json:"transfer_tokens"`
		TransferUs     float64 `json:"transfer_us_per_token,omitempty"`
	} `json:"measured"`
	GPUs  int `json:"gpus"`
	Pools []struct {
		Role     string  `json:"role"`
		Ready    int     `json:"ready"`
		Starting int     `json:"starting"`
		Draining int     `json:"draining"`
		Waiting  int     `json:"waiting"`
		Running  int     `json:"running"`
		KVUsage  float64 `json:"kv_usage"`
	} `json:"pools"`
	Engines []struct {
		Name  string    `json:"name"`
		GPUs  []string  `json:"gpus,omitempty"`
		Phase string    `json:"phase"`
		Since time.Time `json:"since"`
		Says  string    `json:"says,omitempty"`
	} `json:"engines"`
	Decisions []Decision `json:"decisions"` // the latest first
}

// Decision is a change that a planner decided.
type Decision struct {
	Time   time.Time `json:"time"`
	Had    Engines   `json:"had"`
	Want   Engines   `json:"want"`
	Reason string    `json:"reason"`
	Start  []string  `json:"start,omitempty"`
	Stop   []string  `json:"stop,omitempty"`
	Chosen []string  `json:"chosen,omitempty"`
	Result string    `json:"result"`
	TookS  float64   `json:"took_s,omitempty"`
}

// state says what a planner does just now.
func (p *Planner) state() string {
	s := p.Status
	switch {
	case s == nil:
		return state(p.Error)
	case !s.Leader:
		return "stands by"
	case s.Problem != "":
		return "decides nothing: " + s.Problem
	}
	var doing []string
	for _, e := range s.Engines {
		if e.Phase != "ready" {
			text := fmt.Sprintf("%s %s for %s", e.Name, e.Phase, since(e.Since))
			if e.Says != "" {
				text += fmt.Sprintf(" (%.80s)", e.Says)
			}
			doing = append(doing, text)
		}
	}
	if len(doing) == 0 {
		doing = []string{"leads"}
	}
	if s.DryRun {
		doing = append(doing, "dry run: it changes nothing")
	}
	return strings.Join(doing, ", ")
}

// printPlanners shows the pools as planners see them, what they do and what they decided of late.
func (r *Report) printPlanners(t io.Writer) {
	if len(r.Planners) == 0 {
		return
	}
	fmt.Fprintf(t, "\nPLANNER\tFOR\tBY\tPOOLS READY+STARTING-DRAINING\tWAITING\tRUNNING\tKV\tGPUS OF\tPID\tUP\tSTATE\n")
	for i := range r.Planners {
		p := &r.Planners[i]
		scope := p.Model
		if p.Namespace != "" {
			scope = p.Namespace + "/" + p.Model
		}
		by, pools, waiting, running, usage, gpus := "-", "-", "-", "-", "-", "-"
		if s := p.Status; s != nil && s.Leader {
			var columns [4][]string
			for _, x := range s.Pools {
				text := fmt.Sprintf("%s %d", x.Role, x.Ready)
				if x.Starting > 0 {
					text += fmt.Sprintf("+%d", x.Starting)
				}
				if x.Draining > 0 {
					text += fmt.Sprintf("-%d", x.Draining)
				}
				for j, v := range []string{text, fmt.Sprint(x.Waiting), fmt.Sprint(x.Running), fmt.Sprintf("%.0f %%", 100*x.KVUsage)} {
					columns[j] = append(columns[j], v)
				}
			}
			pools, waiting, running, usage = strings.Join(columns[0], ", "), strings.Join(columns[1], ", "), strings.Join(columns[2], ", "), strings.Join(columns[3], ", ")
			by, gpus = s.Planner, fmt.Sprintf("%d of %d-%d", s.GPUs, s.Limits.MinGPUs, s.Limits.MaxGPUs)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", p.ID, scope, by, pools, waiting, running, usage, gpus, p.PID, since(p.Started), p.state())
	}
	r.printDecisions(t)
}

func (r *Report) printDecisions(t io.Writer) {
	first := true
	for _, p := range r.Planners {
		if p.Status == nil {
			continue
		}
		for i, d := range p.Status.Decisions {
			if i == decisionsShown {
				break
			}
			if first {
				fmt.Fprintf(t, "\nDECISION\tAGO\tFROM\tTO\tSTARTS\tSTOPS\tRESULT\tWHY\n")
				first = false
			}
			result := d.Result
			if d.TookS > 0 {
				result += fmt.Sprintf(" after %.1f s", d.TookS)
			}
			why := d.Reason
			if len(d.Chosen) > 0 {
				why += "; " + strings.Join(d.Chosen, "; ")
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", p.ID, since(d.Time), d.Had, d.Want, orDash(strings.Join(d.Start, " ")), orDash(strings.Join(d.Stop, " ")), result, why)
		}
	}
}

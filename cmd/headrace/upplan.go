package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/supervise"
	"github.com/headrace/headrace/scheduler/planner"
)

// addNamespace is for who runs workers.
func addNamespace(fs *pflag.FlagSet, to *string) {
	fs.StringVar(to, "namespace", "", "`name` of the deployment that workers belong to: a planner counts those of its own alone (default: none)")
}

// upPlanFlags are those of `headrace up` about its planner.
type upPlanFlags struct {
	planFlags
	dry bool
}

func (f *upPlanFlags) add(fs *pflag.FlagSet) {
	f.planFlags.add(fs)
	fs.BoolVar(&f.dry, "planner-dry-run", false, "the planner says what it would do, and does nothing")
}

// options are what `headrace up` runs its planner with; nil without one. What the planner could not be made of is found here.
func (f *upPlanFlags) options(fs *pflag.FlagSet, o *supervise.Options) (*supervise.Planner, error) {
	if len(f.specs) == 0 {
		for _, name := range append([]string{"planner-dry-run", "max-gpus"}, planFlagsHandedOn...) {
			if fs.Changed(name) {
				return nil, config.Misused(fmt.Errorf("--%s is of no use without --planner", name))
			}
		}
		return nil, nil
	}
	p := &supervise.Planner{MaxGPUs: f.limits.MaxGPUs}
	// An engine of the beginning may be of a kind that serves whole requests: then how many take what is known later, and checked by the planner.
	f.limits.Undivided = o.Prefill == 0
	f.limits.EngineGPUs = planner.Pools{Prefill: max(1, o.Shapes["prefill"].TensorParallel), Decode: max(1, o.Shapes["decode"].TensorParallel), Whole: max(1, o.Shapes["decode"].TensorParallel)}
	if _, err := f.make(); err != nil {
		return nil, config.Misused(err)
	}
	fs.VisitAll(func(flag *pflag.Flag) {
		for _, name := range planFlagsHandedOn {
			if flag.Name == name && flag.Changed {
				value := flag.Value.String()
				if name == "planner" {
					value = f.specs[0]
				}
				p.Args = append(p.Args, "--"+name+"="+value)
			}
		}
	})
	if f.dry {
		p.Args = append(p.Args, "--dry-run")
	}
	return p, nil
}

package main

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/test/vllm/stage"
)

// pin binds every thread of prefill's processes to one core and of decode's to another, and one engine to the first: the
// processes of a vLLM wait by looking without rest, so that two engines on the same cores would wait for each other's
// waiting. Threads to come inherit it. Clients, routers and daemons go where they like.
func (k *kind) pin(want bool) error {
	if !want {
		return nil
	}
	var first, second unix.CPUSet
	if err := unix.SchedGetaffinity(0, &first); err != nil {
		return fmt.Errorf("read which cores there are: %w", err)
	}
	var cores []int
	for cpu := range len(first) * 64 {
		if first.IsSet(cpu) {
			cores = append(cores, cpu)
		}
	}
	if len(cores) < 2 {
		return fmt.Errorf("there are %d cores; -pin=false does without", len(cores))
	}
	first.Zero()
	first.Set(cores[0])
	second.Set(cores[1])
	if k.cluster == nil {
		pid := k.engine.Process().PID()
		return bind(append(stage.Children(pid), pid), &first)
	}
	for role, set := range map[string]*unix.CPUSet{registry.RolePrefill: &first, registry.RoleDecode: &second} {
		pids, err := k.cluster.EnginePIDs(role)
		if err != nil {
			return err
		}
		if err := bind(pids, set); err != nil {
			return err
		}
	}
	return nil
}

func bind(pids []int, set *unix.CPUSet) error {
	for _, pid := range pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			return fmt.Errorf("list the threads of an engine: %w", err)
		}
		for _, task := range tasks {
			tid, err := strconv.Atoi(task.Name())
			if err != nil {
				continue
			}
			if err := unix.SchedSetaffinity(tid, set); err != nil && err != unix.ESRCH {
				return fmt.Errorf("bind thread %d of process %d: %w", tid, pid, err)
			}
		}
	}
	return nil
}

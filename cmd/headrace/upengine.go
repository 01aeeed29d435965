package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/sidecar"
	"github.com/headrace/headrace/internal/supervise"
)

// plan makes `headrace up` run engines of another kind, when --engine or --command says so. What would keep all of them
// from starting is found here, once and before anything runs.
func (o *engineFlags) plan(cmd *cobra.Command, up *supervise.Options, args []string) error {
	if o.engine == "" && o.command == "" {
		if len(args) > 0 {
			return config.Misused(fmt.Errorf("unexpected argument %q: Headrace's own workers take none; use --engine or --command", args[0]))
		}
		return nil
	}
	if o.engine != "" && o.command != "" {
		return config.Misused(errors.New("--engine and --command: give one of them"))
	}
	if err := o.validateTemplate(); err != nil {
		return config.Misused(err)
	}
	dialect := o.dialect
	if dialect == "" {
		dialect = map[string]string{"vllm": sidecar.DialectVLLM, "vllm-nixl": sidecar.DialectVLLMNixl}[o.engine]
	}
	e := &supervise.Engine{Args: args, Start: sidecar.StartTimeout, Attaches: dialect == sidecar.DialectVLLM, GPUs: o.gpus}
	e.Whole = dialect == "" || dialect == sidecar.DialectOpenAI
	if e.Whole && !cmd.Flags().Changed("prefill") {
		up.Prefill = 0
	}
	up.Engine = e
	o.model, o.modelName = up.Model, up.ModelName
	if o.engine != "" {
		if err := o.planNamed(cmd.Context(), up); err != nil {
			return err
		}
	}
	for name, value := range map[string]string{"engine": o.engine, "command": o.command, "dialect": o.dialect, "python": o.python, "connector-path": o.connectorPath, "device": o.device} {
		if value != "" {
			e.Flags = append(e.Flags, "--"+name+"="+value)
		}
	}
	for _, v := range o.env {
		e.Flags = append(e.Flags, "--env="+v)
	}
	return nil
}

// planNamed checks what vLLM needs and shares the GPUs out.
func (o *engineFlags) planNamed(ctx context.Context, up *supervise.Options) error {
	if err := o.checkModel(&sidecar.Values{}); err != nil {
		return err
	}
	if !sidecar.IsHub(o.model) {
		var err error
		if up.Model, err = filepath.Abs(o.model); err != nil {
			return err
		}
	}
	python, err := sidecar.FindPython(ctx, o.python)
	if err != nil {
		return err
	}
	if err := python.Check(o.engine); err != nil {
		return err
	}
	o.python = python.Executable
	if o.engine == "vllm" {
		if o.connectorPath, err = o.connector(python); err != nil {
			return err
		}
		if o.connectorPath == "" {
			o.connectorPath = "installed"
		}
	}
	if o.device == "auto" {
		o.device = sidecar.DetectDevice(len(o.gpus) > 0)
	}
	if o.device == sidecar.DeviceCUDA && len(o.gpus) == 0 {
		have, need := sidecar.GPUs(), up.Ranks()
		if up.Planner != nil {
			need = max(need, up.Planner.MaxGPUs)
		}
		if len(have) < need {
			return fmt.Errorf("%d engines need %d GPUs and this machine has %d: name them with --gpus, run fewer engines, allow fewer with --max-gpus, or --device cpu", up.Prefill+up.Decode, need, len(have))
		}
		up.Engine.GPUs = have[:need]
	}
	return nil
}

package sidecar

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
)

// hub is how a model is called on the Hugging Face hub: ORGANISATION/NAME.
var hub = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$`)

// IsHub tells whether a model is the name of one on the hub, which the engine fetches, and no folder here.
func IsHub(model string) bool {
	_, err := os.Stat(model)
	return errors.Is(err, fs.ErrNotExist) && hub.MatchString(model)
}

// CheckModel says why a folder is no model that vLLM reads.
func CheckModel(model string) error {
	if IsHub(model) {
		return nil
	}
	info, err := os.Stat(model)
	switch {
	case err != nil:
		return fmt.Errorf("open model: %w; --model takes a folder in Hugging Face's form, or ORGANISATION/NAME of one on the hub", err)
	case !info.IsDir():
		return fmt.Errorf("open model: %s is a file; vLLM reads folders in Hugging Face's form (config.json, *.safetensors)", model)
	}
	if _, err := os.Stat(filepath.Join(model, "config.json")); err != nil {
		return fmt.Errorf("open model: %s has no config.json; vLLM reads folders in Hugging Face's form (config.json, *.safetensors)", model)
	}
	return nil
}

// DetectDevice says what an engine runs on: a GPU where there is one, or one was asked for.
func DetectDevice(asked bool) string {
	if asked || len(GPUs()) > 0 {
		return DeviceCUDA
	}
	return DeviceCPU
}

// GPUs lists this machine's NVIDIA GPUs by their numbers.
func GPUs() []string {
	files, _ := filepath.Glob("/dev/nvidia[0-9]*")
	var gpus []string
	for i := range files {
		gpus = append(gpus, fmt.Sprint(i))
	}
	return gpus
}

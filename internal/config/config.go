// Package config turns a file, the environment and flags into one set of values, and reads what parts share:
// sizes, the cluster key, the log options. It must not know what any option means to a part.
//
// Strength rises from file to environment to flag: a file is written once for a machine, a variable is set for a
// process, and a flag is what a person typed just now.
package config

import (
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/rawbytes"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

const (
	envPrefix = "HEADRACE_"
	// fileBytesMax bounds a configuration file: these have tens of lines.
	fileBytesMax = 1 << 20
)

// Source says where values come from.
type Source struct {
	File    string   // YAML; "" for none
	Env     []string // as os.Environ gives it
	Section string   // the subcommand: its section in the file is stronger than the file's top level
	// Known tells the options and sections of all subcommands, so that one file can serve them all and a
	// misspelt word is still found.
	Known func(word string) bool
}

// Apply sets every flag that was not given on the command line from the environment or the file.
func Apply(flags *pflag.FlagSet, src Source) error {
	file, err := readFile(src)
	if err != nil {
		return err
	}
	env := envValues(src.Env)
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "config" || f.Name == "help" {
			return
		}
		if v, ok := env[f.Name]; ok {
			if err := flags.Set(f.Name, v); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", EnvName(f.Name), err))
			}
			return
		}
		for _, key := range []string{src.Section + "." + f.Name, f.Name} {
			if _, section := file.Get(key).(map[string]any); section || !file.Exists(key) {
				continue // a section is named as its subcommand, which may be a flag of another one too
			}
			for _, value := range texts(file, key, f.Value.Type()) {
				if err := flags.Set(f.Name, value); err != nil {
					errs = append(errs, fmt.Errorf("%s: %s: %w", src.File, key, err))
				}
			}
			return
		}
	})
	return errors.Join(errs...)
}

// EnvName is the variable of a flag: data-dir is HEADRACE_DATA_DIR.
func EnvName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

func envValues(environ []string) map[string]string {
	values := map[string]string{}
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		if rest, ok := strings.CutPrefix(name, envPrefix); ok {
			values[strings.ToLower(strings.ReplaceAll(rest, "_", "-"))] = value
		}
	}
	return values
}

// texts are what a flag is set to, one after the other. An array's values may have commas in them.
func texts(k *koanf.Koanf, key, kind string) []string {
	list, ok := k.Get(key).([]any)
	if !ok || kind != "stringArray" {
		return []string{text(k, key)}
	}
	words := make([]string, len(list))
	for i, v := range list {
		words[i] = fmt.Sprint(v)
	}
	return words
}

// text writes a YAML value as a person would type it after the flag.
func text(k *koanf.Koanf, key string) string {
	if list, ok := k.Get(key).([]any); ok {
		words := make([]string, len(list))
		for i, v := range list {
			words[i] = fmt.Sprint(v)
		}
		return strings.Join(words, ",")
	}
	return fmt.Sprint(k.Get(key))
}

func readFile(src Source) (*koanf.Koanf, error) {
	k := koanf.New(".")
	if src.File == "" {
		return k, nil
	}
	info, err := os.Stat(src.File)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if info.Size() > fileBytesMax {
		return nil, fmt.Errorf("read configuration %s: %d bytes, at most %d", src.File, info.Size(), fileBytesMax)
	}
	data, err := os.ReadFile(src.File)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if err := parse(k, data); err != nil {
		return nil, fmt.Errorf("read configuration %s: %w", src.File, err)
	}
	return k, checkWords(k, src)
}

func parse(k *koanf.Koanf, data []byte) error { return k.Load(rawbytes.Provider(data), yaml.Parser()) }

// checkWords finds what is no option of any subcommand: left unread it would be a wish silently not granted.
func checkWords(k *koanf.Koanf, src Source) error {
	if src.Known == nil {
		return nil
	}
	var unknown []string
	for _, key := range k.Keys() {
		for _, word := range strings.Split(key, ".") {
			if !src.Known(word) {
				unknown = append(unknown, key)
				break
			}
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	sort.Strings(unknown)
	return fmt.Errorf("read configuration %s: no such option: %s", src.File, strings.Join(unknown, ", "))
}

// Misuse marks an error that is the caller's: a wrong flag, value or combination. Commands exit with 2 on it.
type Misuse struct{ Err error }

func (m *Misuse) Error() string { return m.Err.Error() }
func (m *Misuse) Unwrap() error { return m.Err }

// Misused wraps err as a Misuse; nil stays nil.
func Misused(err error) error {
	if err == nil {
		return nil
	}
	return &Misuse{err}
}

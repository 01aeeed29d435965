package main

import (
	"bufio"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/router"
)

const (
	keyBytes = 32
	// keyCharsMin is how long a key must be that somebody else made: shorter ones may be found from their hashes by trying.
	keyCharsMin = 22
	keyPrefix   = "hr-"
)

func (a *app) key() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Make API keys for the router's clients",
		Example: `  headrace key new alice --file keys.txt
  headrace key hash bob < bobs-key >> keys.txt`,
		Args: cobra.ArbitraryArgs,
		RunE: group,
	}
	cmd.AddCommand(a.keyNew(), a.keyHash())
	return cmd
}

// named wants a key's name as the only argument.
func named(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return config.Misused(errors.New("name the key's owner, as in: headrace key new alice"))
	}
	return config.Misused(router.KeyName(args[0]))
}

func (a *app) keyNew() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "new NAME",
		Short: "Make a key and print it, this once, with the line by which a router knows it",
		Long: `Makes a key of 256 random bits and prints it, which nobody can do again, and the line for the router's --api-keys-file. The line has
the key's hash, from which there is no way back to the key. NAME is what logs and metrics call the client.`,
		Example: "  headrace key new alice --file keys.txt",
		Args:    named,
	}
	cmd.Flags().StringVar(&file, "file", "", "append the line to this `file` of a router, who reads it again by itself")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		var b [keyBytes]byte
		if _, err := rand.Read(b[:]); err != nil {
			return fmt.Errorf("draw a key: %w", err)
		}
		key := keyPrefix + base64.RawURLEncoding.EncodeToString(b[:])
		line := router.KeyLine(args[0], key)
		if file == "" {
			fmt.Fprintf(a.out, "key (shown this once):  %s\nline for the file:      %s\n", key, line)
			return nil
		}
		if err := appendLine(file, line); err != nil {
			return err
		}
		fmt.Fprintln(a.out, key)
		return nil
	}
	return cmd
}

func (a *app) keyHash() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "hash NAME",
		Short:   "Print the line by which a router knows the key on standard input",
		Example: "  headrace key hash bob < bobs-key >> keys.txt",
		Args:    named,
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		s := bufio.NewScanner(io.LimitReader(cmd.InOrStdin(), 1<<16))
		s.Scan()
		key := strings.TrimSpace(s.Text())
		if len(strings.Fields(key)) != 1 {
			return config.Misused(errors.New("give the key on standard input, one word"))
		}
		if len(key) < keyCharsMin {
			return fmt.Errorf("the key has %d characters, and one of less than %d may be found from its hash by trying: make one with `headrace key new %s`", len(key), keyCharsMin, args[0])
		}
		fmt.Fprintln(a.out, router.KeyLine(args[0], key))
		return nil
	}
	return cmd
}

// appendLine appends a line to a file, which it makes where there is none. The last line may lack its end.
func appendLine(file, line string) error {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("append the key's line: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > 0 {
		var last [1]byte
		if _, err := f.ReadAt(last[:], info.Size()-1); err == nil && last[0] != '\n' {
			line = "\n" + line
		}
	}
	if _, err := f.WriteString(line + "\n"); err != nil {
		return fmt.Errorf("append the key's line to %s: %w", file, err)
	}
	return f.Close()
}

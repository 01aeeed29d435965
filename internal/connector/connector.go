// Package connector hands out a Python package that is carried in this program: as a folder for PYTHONPATH, or as a wheel
// for pip. It must not know what the package does.
package connector

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Name is the package's.
const Name = "headrace"

// file is one of the package.
type file struct {
	path string // below the folder that has the package
	data []byte
}

// read lists the package's files in order, without what Python left behind.
func read(files fs.FS) ([]file, error) {
	var out []file
	err := fs.WalkDir(files, Name, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if d.Name() == "__pycache__" {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(p, ".py") && path.Base(p) != "py.typed" {
			return nil
		}
		data, err := fs.ReadFile(files, p)
		out = append(out, file{p, data})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the connector in this program: %w", err)
	}
	return out, nil
}

// digest names the files by their content.
func digest(files []file) string {
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%s %d\n", f.path, len(f.data))
		h.Write(f.data)
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// Unpack puts the package into a folder of its own below cache and returns that folder, for PYTHONPATH. Programs that carry
// other content use other folders; files that are there already and right are left alone.
func Unpack(files fs.FS, cache string) (string, error) {
	list, err := read(files)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "connector-"+digest(list))
	for _, f := range list {
		if err := place(filepath.Join(dir, filepath.FromSlash(f.path)), f.data); err != nil {
			return "", fmt.Errorf("unpack the connector (set XDG_CACHE_HOME, or use --connector-path): %w", err)
		}
	}
	return dir, nil
}

// place writes a file unless it is there; nobody ever reads half of it.
func place(name string, data []byte) error {
	if have, err := os.ReadFile(name); err == nil && bytes.Equal(have, data) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(name), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), name)
}

// Values of pyproject.toml that a wheel repeats. Each is on a line of its own there.
var (
	versionLine  = regexp.MustCompile(`(?m)^version = "([0-9A-Za-z.+!-]+)"`)
	summaryLine  = regexp.MustCompile(`(?m)^description = "([^"\n]+)"`)
	requiresLine = regexp.MustCompile(`(?m)^requires-python = "([^"\n]+)"`)
	noNeedsLine  = regexp.MustCompile(`(?m)^dependencies = \[\]`)
)

// Wheel writes the package as a wheel into dir and returns its path. The same content gives the same bytes.
func Wheel(files fs.FS, dir string) (string, error) {
	list, err := read(files)
	if err != nil {
		return "", err
	}
	meta, version, err := metadata(files)
	if err != nil {
		return "", err
	}
	info := Name + "-" + version + ".dist-info/"
	list = append(list, file{info + "METADATA", meta},
		file{info + "WHEEL", []byte("Wheel-Version: 1.0\nGenerator: headrace\nRoot-Is-Purelib: true\nTag: py3-none-any\n")})
	var record strings.Builder
	for _, f := range list {
		sum := sha256.Sum256(f.data)
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.path, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.data))
	}
	fmt.Fprintf(&record, "%sRECORD,,\n", info)
	list = append(list, file{info + "RECORD", []byte(record.String())})
	var buf bytes.Buffer
	z := zip.NewWriter(&buf)
	for _, f := range list {
		h := &zip.FileHeader{Name: f.path, Method: zip.Deflate, Modified: time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC)}
		h.SetMode(0o644)
		w, err := z.CreateHeader(h)
		if err == nil {
			_, err = w.Write(f.data)
		}
		if err != nil {
			return "", fmt.Errorf("write wheel: %w", err)
		}
	}
	if err := z.Close(); err != nil {
		return "", fmt.Errorf("write wheel: %w", err)
	}
	name := filepath.Join(dir, Name+"-"+version+"-py3-none-any.whl")
	if err := place(name, buf.Bytes()); err != nil {
		return "", fmt.Errorf("write wheel: %w", err)
	}
	return name, nil
}

// metadata is the wheel's METADATA.
func metadata(files fs.FS) (meta []byte, version string, err error) {
	project, err := fs.ReadFile(files, "pyproject.toml")
	if err != nil {
		return nil, "", fmt.Errorf("read the connector in this program: %w", err)
	}
	readme, err := fs.ReadFile(files, "README.md")
	if err != nil {
		return nil, "", fmt.Errorf("read the connector in this program: %w", err)
	}
	v, summary, requires := versionLine.FindSubmatch(project), summaryLine.FindSubmatch(project), requiresLine.FindSubmatch(project)
	if v == nil || summary == nil || requires == nil || !noNeedsLine.Match(project) {
		return nil, "", errors.New("read the connector's pyproject.toml: version, description, requires-python or empty dependencies are not where they are looked for")
	}
	text := fmt.Sprintf("Metadata-Version: 2.1\nName: %s\nVersion: %s\nSummary: %s\nLicense: Apache-2.0\nRequires-Python: %s\nDescription-Content-Type: text/markdown\n\n%s",
		Name, v[1], summary[1], requires[1], readme)
	return []byte(text), string(v[1]), nil
}

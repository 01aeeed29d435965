// Package cluster holds the words of scheduling: what a snapshot says of hosts, models, instances, gangs, queues and jobs.
// It decides nothing, reads no file and knows no clock. Its YAML form is documented in docs/scheduling.md and read by
// scheduler/snapfile; a field's comment says what leaving it out means.
//
// The words follow their sources: placement and scale down GPUStack, serving groups Kthena, queues and jobs Volcano.
package cluster

// Snapshot is everything a decision may depend on. Lists keep their order, and ties are decided by it.
type Snapshot struct {
	Settings     Settings      `yaml:"settings"`
	Hosts        []Host        `yaml:"hosts"`
	Channels     []Channel     `yaml:"channels"`
	ModelFiles   []ModelFile   `yaml:"model_files"`
	Models       []Model       `yaml:"models"`
	Instances    []Instance    `yaml:"instances"`
	Gangs        []Gang        `yaml:"gangs"`
	Serving      []Serving     `yaml:"serving"`
	Queues       []Queue       `yaml:"queues"`
	Jobs         []Job         `yaml:"jobs"`
	Partition    *Partition    `yaml:"partition"`
	ControlPlane *ControlPlane `yaml:"control_plane"`
}

// Host states. Anything but ready keeps new instances away; not_ready makes those there worthless (scale down: status 0).
const (
	Ready    = "ready"
	NotReady = "not_ready"
)

// Host is a machine. Allocatable is total - reserved - used - what the snapshot's instances and running tasks claim there.
type Host struct {
	Name    string            `yaml:"name"`
	Line    int               `yaml:"-"`
	Cluster string            `yaml:"cluster"`
	State   string            `yaml:"state" enum:"ready,not_ready,maintenance,unreachable"` // empty: ready
	Labels  map[string]string `yaml:"labels"`
	// CPU in cores; left out: processors are not counted here.
	CPU            Milli `yaml:"cpu"`
	CPUUsed        Milli `yaml:"cpu_used"`
	Memory         Bytes `yaml:"memory"`
	MemoryReserved Bytes `yaml:"memory_reserved"`
	MemoryUsed     Bytes `yaml:"memory_used"` // by what the snapshot does not list
	GPUs           []GPU `yaml:"gpus"`
	NICs           []NIC `yaml:"nics"`
	// Cards counts what jobs ask for by name where GPUs do not say it (MIG and MPS shares); GPUs' cards come on top.
	Cards map[string]int64 `yaml:"cards"`
	// Paths are the local files and folders that exist here, for models with local_path.
	Paths []string `yaml:"paths"`
}

// Usable says whether the host takes new instances.
func (h *Host) Usable() bool { return h.State == "" || h.State == Ready }

// GPU is one device.
type GPU struct {
	// Count equal devices; the reader of a snapshot writes them out. 0: 1.
	Count int `yaml:"count"`
	// Index is its number on the host; left out: its place in the list.
	Index  *int   `yaml:"index"`
	Model  string `yaml:"model"`
	Vendor string `yaml:"vendor"` // cuda, rocm, cann, musa, ...; left out: cuda
	Memory Bytes  `yaml:"memory"`
	// Reserved and Used are memory that is not to be had: kept back, or used by what the snapshot does not list.
	Reserved Bytes    `yaml:"memory_reserved"`
	Used     Bytes    `yaml:"memory_used"`
	NUMA     int      `yaml:"numa" sign:"any"`
	NICs     []string `yaml:"nics"` // NICs behind the same PCIe switch, the nearest first
	Card     string   `yaml:"card"` // the name that queues' quotas use; left out: Model
}

// NIC is a network port.
type NIC struct {
	Name   string  `yaml:"name"`
	Kind   string  `yaml:"kind" enum:"rdma,tcp"` // empty: tcp
	Gbps   float64 `yaml:"gbps"`
	NUMA   int     `yaml:"numa"`
	Fabric string  `yaml:"fabric"` // ports of equal fabric reach each other
}

// Channel is a measured connection of two hosts, good in both directions.
type Channel struct {
	From string  `yaml:"from"`
	To   string  `yaml:"to"`
	Line int     `yaml:"-"`
	Gbps float64 `yaml:"gbps"`
}

// ModelFile says that a host has a model's files.
type ModelFile struct {
	Model string `yaml:"model"`
	Host  string `yaml:"host"`
	Line  int    `yaml:"-"`
	State string `yaml:"state" enum:"ready,downloading,error"` // empty: ready
}

// Strategies of placement.
const (
	Binpack = "binpack"
	Spread  = "spread"
)

// Roles of an instance.
const (
	Prefill = "prefill"
	Decode  = "decode"
)

// Model is what instances are made of, and how many there should be.
type Model struct {
	Name string `yaml:"name"`
	Line int    `yaml:"-"`
	// Backend is the engine: vllm, sglang, mindie, gguf, custom, voxbox, headrace; it says which fits may be tried.
	Backend  string            `yaml:"backend"`
	Cluster  string            `yaml:"cluster"` // left out: any
	Selector map[string]string `yaml:"selector"`
	Vendors  []string          `yaml:"vendors"` // accelerators it runs on; left out: what the backend can
	// GPUs names devices, "host:index"; the instance takes of these and of no others.
	GPUs      []string `yaml:"gpus"`
	LocalPath string   `yaml:"local_path"`
	Strategy  string   `yaml:"strategy" enum:"binpack,spread"` // empty: settings.strategy
	Role      string   `yaml:"role" enum:"prefill,decode"`
	Pair      string   `yaml:"pair"`  // the model of the other role, to be near to
	Draft     string   `yaml:"draft"` // the model that drafts for it, on the same devices
	Claim     Claim    `yaml:"claim"`
	// Replicas is how many instances there should be; left out: as many as there are.
	Replicas  *int      `yaml:"replicas"`
	ScaleDown ScaleDown `yaml:"scale_down"`
}

// Claim says what an instance takes.
type Claim struct {
	CPU Milli `yaml:"cpu"`
	RAM Bytes `yaml:"ram"`
	// VRAM of the whole instance. With gpu_share the instance takes that share of each GPU, and VRAM is what must fit into it.
	VRAM Bytes `yaml:"vram"`
	// GPUShare of a GPU's total memory is taken whatever is needed. Left out: 0.9 for vllm, sglang and mindie, else none.
	GPUShare *float64 `yaml:"gpu_share"`
	// GPUsEach is the number of GPUs of an instance (tensor x pipeline parallelism); 0: as few as fit.
	GPUsEach int `yaml:"gpus_each"`
	// Heads are the model's attention heads: a number of GPUs that does not divide them is not tried. 0: not known.
	Heads  int     `yaml:"heads"`
	Layers *Layers `yaml:"layers"`
	// RAMCPU is the memory on a host without any GPU part; left out: RAM + VRAM, or by Layers.
	RAMCPU Bytes `yaml:"ram_cpu"`
	// File is a GGUF file to read the layers from, beside the snapshot; the reader of the snapshot fills Layers.
	File     string `yaml:"file"`
	Context  int    `yaml:"context"`   // tokens of context a sequence, for File; 0: the model's own, at most 8192
	Parallel int    `yaml:"sequences"` // sequences at once, for File; 0: 1
}

// Layers says how a model's memory divides, for what can be partly offloaded to GPUs.
type Layers struct {
	Count  int   `yaml:"count"`
	Weight Bytes `yaml:"weight"` // of a layer
	KV     Bytes `yaml:"kv"`     // cache of a layer
	// Output is what goes to the GPUs with the last layer, Input what always stays in RAM, Buffer what each GPU needs beside.
	Output Bytes `yaml:"output"`
	Input  Bytes `yaml:"input"`
	Buffer Bytes `yaml:"buffer"`
}

// ScaleDown says how instances that are too many are chosen.
type ScaleDown struct {
	// Order: score is GPUStack's (lowest score goes first), cost is the computed cost of a removal, ordinal the highest number.
	Order     string `yaml:"order" enum:"score,cost,ordinal"` // empty: score
	Partition int    `yaml:"partition"`                       // instances with ordinals below go last
	MaxTotal  int    `yaml:"max_total"`                       // 100: scores are shown rescaled to 100; 0: 0..111
}

// Instance states.
const (
	Running  = "running"
	Creating = "creating"
	Failed   = "error"
	Draining = "draining"
	Deleting = "deleting"
)

// Instance is an engine that exists.
type Instance struct {
	Name    string `yaml:"name"`
	Line    int    `yaml:"-"`
	Model   string `yaml:"model"`
	State   string `yaml:"state" enum:"running,creating,starting,error,draining,deleting"` // empty: running
	Ordinal *int   `yaml:"ordinal"`                                                        // left out: its place among the model's
	Parts   []Part `yaml:"parts"`
	// Host, RAM, GPUs and VRAM say the same for an instance of one part.
	Host string `yaml:"host"`
	CPU  Milli  `yaml:"cpu"`
	RAM  Bytes  `yaml:"ram"`
	VRAM Bytes  `yaml:"vram"` // a GPU
	GPUs []int  `yaml:"gpus"`
	// LayersTotal and LayersOffloaded; left out: not known.
	LayersTotal     *int   `yaml:"layers_total"`
	LayersOffloaded *int   `yaml:"layers_offloaded"`
	Gang            string `yaml:"gang"` // the gang it belongs to
	// Load is what would be lost or moved with it.
	Load Load `yaml:"load"`
	// DeletionCost overrides the computed cost.
	DeletionCost *float64 `yaml:"deletion_cost" sign:"any"`
}

// Part is the share of an instance on one host.
type Part struct {
	Host string `yaml:"host"`
	CPU  Milli  `yaml:"cpu"`
	RAM  Bytes  `yaml:"ram"`
	VRAM Bytes  `yaml:"vram"` // a GPU
	GPUs []int  `yaml:"gpus"`
}

// Load is an instance's work.
type Load struct {
	Requests []Request `yaml:"requests"`
	InFlight int       `yaml:"in_flight"` // requests that are not listed one by one
	// HotPrefix is the KV in its cache that recent requests matched, HotOnly the part of it that no other instance holds.
	HotPrefix Bytes `yaml:"hot_prefix"`
	HotOnly   Bytes `yaml:"hot_only"`
	KVTotal   Bytes `yaml:"kv_total"` // capacity of its cache
	KVUsed    Bytes `yaml:"kv_used"`
}

// Request is one that runs.
type Request struct {
	ID string `yaml:"id"`
	KV Bytes  `yaml:"kv"` // live KV cache
	// Left is the number of tokens it may still write; it decides whether waiting or moving is cheaper.
	Left int `yaml:"tokens_left"`
}

// Gang is a set of instances that are placed together or not at all.
type Gang struct {
	Name    string   `yaml:"name"`
	Line    int      `yaml:"-"`
	Members []Member `yaml:"members"`
	// Min is how many of the members must be running; left out: all.
	Min int `yaml:"min"`
}

// Member is a number of instances of a model.
type Member struct {
	Model string `yaml:"model"`
	Count int    `yaml:"count"` // 0: 1
}

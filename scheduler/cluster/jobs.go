package cluster

// Serving is a set of serving groups (Kthena): numbered groups of roles, of which each replica is an entry pod and workers.
type Serving struct {
	Name string `yaml:"name"`
	Line int    `yaml:"-"`
	// Replicas is how many groups there should be; left out: as many as there are.
	Replicas  *int           `yaml:"replicas"`
	Partition int            `yaml:"partition"`
	Order     string         `yaml:"order" enum:"cost,ordinal"` // empty: cost; ordinal is the old order
	Roles     []Role         `yaml:"roles"`
	Groups    []ServingGroup `yaml:"groups"`
	Ratio     *PDRatio       `yaml:"ratio"`
}

// Role is what each group should have of it.
type Role struct {
	Name     string `yaml:"name"`
	Replicas int    `yaml:"replicas"`
	Workers  int    `yaml:"workers"` // beside the entry pod
}

// ServingGroup is a group that exists.
type ServingGroup struct {
	Ordinal int         `yaml:"ordinal"`
	Line    int         `yaml:"-"`
	Status  string      `yaml:"status" enum:"running,creating,scaling,updating,error,deleting"` // empty: running
	Cost    *float64    `yaml:"cost" sign:"any"`                                                // overrides the sum of its roles
	Roles   []GroupRole `yaml:"roles"`
}

// GroupRole is a replica of a role in a group.
type GroupRole struct {
	Role    string   `yaml:"role"`
	Ordinal int      `yaml:"ordinal"`
	Status  string   `yaml:"status" enum:"running,creating,error,deleting"` // empty: running
	Cost    *float64 `yaml:"cost" sign:"any"`                               // overrides the sum of its pods
	Pods    []Pod    `yaml:"pods"`
}

// Pod is one process of a role.
type Pod struct {
	Name         string   `yaml:"name"`
	Line         int      `yaml:"-"`
	DeletionCost *float64 `yaml:"deletion_cost" sign:"any"` // overrides what is computed from Load
	Host         string   `yaml:"host"`
	GPUs         []int    `yaml:"gpus"`
	Load         Load     `yaml:"load"`
}

// PDRatio bounds prefill : decode.
type PDRatio struct {
	Prefill    int   `yaml:"prefill"`
	Decode     int   `yaml:"decode"`
	Min        Ratio `yaml:"min"`
	Max        Ratio `yaml:"max"`
	PrefillMin int   `yaml:"prefill_min"`
	PrefillMax int   `yaml:"prefill_max"` // 0: no bound
	DecodeMin  int   `yaml:"decode_min"`
	DecodeMax  int   `yaml:"decode_max"`
}

// Service types.
const (
	Inference = "inference"
	Training  = "training"
)

// Queue is a share of the cluster (Volcano).
type Queue struct {
	Name     string `yaml:"name"`
	Line     int    `yaml:"-"`
	Priority int    `yaml:"priority" sign:"any"`
	// Reclaimable says whether its jobs may be taken from; left out: yes.
	Reclaimable *bool  `yaml:"reclaimable"`
	State       string `yaml:"state" enum:"open,closed,closing"` // empty: open
	// Quota; an empty one means no limit. A dimension that it leaves out has none, but cards: with any card in it, others are 0.
	Quota Quota `yaml:"quota"`
}

// Quota limits what a queue's jobs hold together; nil is no limit.
type Quota struct {
	CPU    *Milli           `yaml:"cpu"`
	Memory *Bytes           `yaml:"memory"`
	Cards  map[string]Milli `yaml:"cards"`
}

// Job is a set of tasks of one queue.
type Job struct {
	Name     string `yaml:"name"`
	Line     int    `yaml:"-"`
	Queue    string `yaml:"queue"`
	Priority int    `yaml:"priority" sign:"any"`
	// Service is inference or training; left out: by Owner and settings.owner_kinds, else unknown.
	Service     string            `yaml:"service"`
	Owner       string            `yaml:"owner"` // the kind of its owner: Deployment, Job, ...
	Preemptable *bool             `yaml:"preemptable"`
	Annotations map[string]string `yaml:"annotations"`
	// MinAvailable is the gang: fewer running tasks than that are of no use. 0: each task for itself.
	MinAvailable int    `yaml:"min_available"`
	OnEvict      string `yaml:"on_evict" enum:"abort,restart"` // empty: restart
	Tasks        []Task `yaml:"tasks"`
}

// Task is one pod of a job, or Count equal ones.
type Task struct {
	Name    string    `yaml:"name"`
	Line    int       `yaml:"-"`
	Count   int       `yaml:"count"`                                                          // 0: 1
	State   string    `yaml:"state" enum:"running,pending,inqueue,evicted,releasing,aborted"` // empty: running with a host, else pending
	Host    string    `yaml:"host"`
	Request Resources `yaml:"request"`
	// Preemptable overrides the job's; left out everywhere: yes.
	Preemptable *bool `yaml:"preemptable"`
}

// Resources is what a task asks for: only what is named is checked.
type Resources struct {
	CPU    Milli            `yaml:"cpu"`
	Memory Bytes            `yaml:"memory"`
	Cards  map[string]Milli `yaml:"cards"`
}

// Partition asks which control function owns which host (rendezvous hashing).
type Partition struct {
	Functions []string `yaml:"functions"`
	Previous  []string `yaml:"previous"` // the functions before, to show what moves
}

// ControlPlane asks for the number of control functions.
type ControlPlane struct {
	RequestsPerSecond float64            `yaml:"requests_per_second"`
	MaxPerFunction    map[string]float64 `yaml:"max_per_function"`
}

// Settings are weights and switches; each one left out has the value of Defaults.
type Settings struct {
	Strategy string `yaml:"strategy" enum:"binpack,spread"`
	// Maxima of the scorers.
	PlacementMax *float64 `yaml:"placement_max"` // 100
	LocalityMax  *float64 `yaml:"locality_max"`  // 5
	ChannelMax   *float64 `yaml:"channel_max"`   // 5
	NICMax       *float64 `yaml:"nic_max"`       // 1
	// Weights inside them.
	RAMWeight    *float64 `yaml:"ram_weight"`    // 1
	VRAMWeight   *float64 `yaml:"vram_weight"`   // 2
	MainWeight   *float64 `yaml:"main_weight"`   // 5
	SubWeight    *float64 `yaml:"sub_weight"`    // 1
	DraftWeight  *float64 `yaml:"draft_weight"`  // 0.5
	OthersWeight *float64 `yaml:"others_weight"` // 0.2
	StatusMax    *float64 `yaml:"status_max"`    // 100
	OffloadMax   *float64 `yaml:"offload_max"`   // 10
	KeepMax      *float64 `yaml:"keep_max"`      // 1: placement in scale down
	// Backends adds or changes rows of the backend matrix.
	Backends map[string]Backend `yaml:"backends"`
	// NodeBinpack are the weights of Volcano's node score.
	NodeBinpack *NodeBinpack `yaml:"node_binpack"`
	// OverCommitFactor multiplies quotas for jobs that are in queue and not running yet. Left out: 1.
	OverCommitFactor       *float64          `yaml:"overcommit_factor"`
	CardUnlimitedCPUMemory bool              `yaml:"card_unlimited_cpu_memory"`
	OwnerKinds             map[string]string `yaml:"owner_kinds"`
	// IgnoredScalars are card names that no quota is checked for.
	IgnoredScalars []string `yaml:"ignored_scalars"`
	Cost           Cost     `yaml:"cost" sign:"any"`
}

// Backend says which fits a backend may try, and on which accelerators.
type Backend struct {
	OneGPU      bool     `yaml:"one_gpu"`
	SeveralGPUs bool     `yaml:"several_gpus"`
	Hosts       bool     `yaml:"hosts"` // over several hosts
	Partial     bool     `yaml:"partial"`
	CPU         bool     `yaml:"cpu"`
	Vendors     []string `yaml:"vendors"` // empty: any
	GPUShare    float64  `yaml:"gpu_share"`
}

// NodeBinpack are the weights of Volcano's binpack node score.
type NodeBinpack struct {
	Weight float64            `yaml:"weight"`
	CPU    float64            `yaml:"cpu"`
	Memory float64            `yaml:"memory"`
	Cards  map[string]float64 `yaml:"cards"`
	// GPU is the weight of every card that Cards does not name.
	GPU float64 `yaml:"gpu"`
}

// Cost are the prices of what a removal loses, in points.
type Cost struct {
	Request  *float64 `yaml:"request"`   // a request in flight: 10
	HotGiB   *float64 `yaml:"hot_gib"`   // a GiB of hot prefix that others hold too: 1
	OnlyGiB  *float64 `yaml:"only_gib"`  // a GiB of hot prefix that nobody else holds: 20
	FreedGPU *float64 `yaml:"freed_gpu"` // taken off for the share of its host's GPUs that would be free: 10
	Gang     *float64 `yaml:"gang"`      // a removal that breaks a gang: 1e6
}

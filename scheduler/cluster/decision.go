package cluster

// Decision is what to do, and why. It holds lists only, in an order that the snapshot fixes: the same snapshot gives the
// same bytes.
type Decision struct {
	Placements []Placement `json:"placements"`
	Removals   []Removal   `json:"removals"`
	Evictions  []Eviction  `json:"evictions"`
	// Admissions are tasks of jobs that get a host, in the order to be done: all evictions come first.
	Admissions []Admission      `json:"admissions"`
	Denied     []Denial         `json:"denied"`
	Rankings   []Ranking        `json:"rankings,omitempty"`
	Serving    []ServingPlan    `json:"serving,omitempty"`
	Gangs      []GangPlan       `json:"gangs,omitempty"`
	Partitions []PartitionPlan  `json:"partitions,omitempty"`
	Moved      *PartitionChange `json:"moved,omitempty"`
	Functions  []FunctionCount  `json:"functions,omitempty"`
}

// Figure is one number of a score, by name.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Score is what one scorer says of a candidate or an instance.
type Score struct {
	Scorer  string   `json:"scorer"`
	Score   float64  `json:"score"`
	Max     float64  `json:"max"`
	Figures []Figure `json:"figures,omitempty"`
}

// Reject is a host or job that is out, and why.
type Reject struct {
	Host string `json:"host"`
	Why  string `json:"why"`
}

// Filter is what one filter or stage of the fit left, and what it took out.
type Filter struct {
	Name string `json:"name"`
	// Left are hosts for a filter, candidates for a stage.
	Left int      `json:"left"`
	Out  []Reject `json:"out,omitempty"`
}

// Use is what an instance takes on one host. The first one of a placement is the main host.
type Use struct {
	Host string   `json:"host"`
	GPUs []GPUUse `json:"gpus,omitempty"`
	RAM  Bytes    `json:"ram"`
	CPU  Milli    `json:"cpu,omitempty"`
}

// GPUUse is a claim on one device.
type GPUUse struct {
	Index  int   `json:"index"`
	VRAM   Bytes `json:"vram"`
	Layers int   `json:"layers,omitempty"`
}

// Candidate is one way to place an instance.
type Candidate struct {
	Uses []Use `json:"uses"`
	// LayersOffloaded of LayersTotal are on GPUs; both 0 where the backend does not count layers.
	LayersOffloaded int     `json:"layers_offloaded,omitempty"`
	LayersTotal     int     `json:"layers_total,omitempty"`
	Scores          []Score `json:"scores"`
	Total           float64 `json:"total"`
}

// Placement is an instance to start.
type Placement struct {
	Instance string `json:"instance"`
	Model    string `json:"model"`
	Gang     string `json:"gang,omitempty"`
	// Stage of the fit that yielded it: one_gpu, several_gpus, hosts, partial, cpu.
	Stage string `json:"stage"`
	Candidate
	Why     string   `json:"why"`
	Filters []Filter `json:"filters,omitempty"`
	Fit     []Filter `json:"fit,omitempty"`
	// Candidates are all that the stage yielded, the best first.
	Candidates []Candidate `json:"candidates,omitempty"`
}

// Denial is what cannot be done.
type Denial struct {
	// What is denied: instance, gang, task, job, removal.
	What    string   `json:"what"`
	Name    string   `json:"name"`
	Reason  string   `json:"reason"`
	Filters []Filter `json:"filters,omitempty"`
	Fit     []Filter `json:"fit,omitempty"`
}

// Ranked is an instance in the order of removal.
type Ranked struct {
	Instance string  `json:"instance"`
	Remove   bool    `json:"remove"`
	Scores   []Score `json:"scores"`
	Total    float64 `json:"total"`
	Why      string  `json:"why"`
}

// Ranking is a model's instances, the first to go first.
type Ranking struct {
	Model     string   `json:"model"`
	Order     string   `json:"order"`
	Instances []Ranked `json:"instances"`
}

// Move says where a running request goes before its instance ends.
type Move struct {
	Request string `json:"request"`
	// To is the surviving instance; empty: it stays until it is done (drain) .
	To string `json:"to,omitempty"`
	KV Bytes  `json:"kv"`
	// Why it moves there or stays.
	Why string `json:"why"`
}

// Removal is an instance to drain and then to stop.
type Removal struct {
	Instance string `json:"instance"`
	Model    string `json:"model"`
	// Steps in order: drain, move, stop.
	Steps []string `json:"steps"`
	Moves []Move   `json:"moves"`
	Freed []Use    `json:"freed,omitempty"`
	Why   string   `json:"why"`
}

// Eviction is a task to end.
type Eviction struct {
	Job   string `json:"job"`
	Task  string `json:"task"`
	Host  string `json:"host"`
	Queue string `json:"queue"`
	// For is the job that needs the room; Action what becomes of this one: abort or restart.
	For    string `json:"for"`
	Action string `json:"action"`
	Why    string `json:"why"`
}

// Admission is a task that gets a host.
type Admission struct {
	Job    string  `json:"job"`
	Task   string  `json:"task"`
	Host   string  `json:"host"`
	Score  float64 `json:"score"`
	Scores []Score `json:"scores,omitempty"`
	// Nodes are all hosts' scores, those that do not fit too; of the first 64.
	Nodes []NodeScore `json:"nodes,omitempty"`
	Why   string      `json:"why"`
}

// NodeScore is what a host scores for a task before it is booked, and whether it has the room.
type NodeScore struct {
	Host  string  `json:"host"`
	Score float64 `json:"score"`
	Fits  bool    `json:"fits"`
}

// GangPlan is what became of a gang.
type GangPlan struct {
	Gang      string `json:"gang"`
	MinMember int    `json:"min_member"`
	Placed    bool   `json:"placed"`
	Why       string `json:"why"`
}

// ServingPlan is what a serving set's groups come to.
type ServingPlan struct {
	Name      string `json:"name"`
	MinMember int    `json:"min_member"` // pods of a group's gang
	// Order is the order of removal, the first to go first.
	Order      []RankedGroup `json:"order"`
	Delete     []int         `json:"delete"`
	Create     []int         `json:"create"`
	Remain     []int         `json:"remain"`
	PodGroups  []string      `json:"pod_groups"` // to be updated before pods
	Roles      []RolePlan    `json:"roles,omitempty"`
	RatioFrom  *[2]int       `json:"ratio_from,omitempty"`
	RatioTo    *[2]int       `json:"ratio_to,omitempty"`
	RatioWhy   string        `json:"ratio_why,omitempty"`
	RemoveLast string        `json:"remove_pod_groups,omitempty"`
}

// RankedGroup is a group or role in the order of removal.
type RankedGroup struct {
	Ordinal int     `json:"ordinal"`
	Status  string  `json:"status"`
	Cost    float64 `json:"cost"`
	Guarded bool    `json:"guarded,omitempty"` // below the partition
	Why     string  `json:"why,omitempty"`
}

// RolePlan is what a role's replicas in a group come to.
type RolePlan struct {
	Group  int           `json:"group"`
	Role   string        `json:"role"`
	Order  []RankedGroup `json:"order"`
	Delete []int         `json:"delete"`
	Create []int         `json:"create"`
	Remain []int         `json:"remain"`
	// MinTaskMember of the PodGroup; Held says that it stays as it is until the role has its size.
	MinTaskMember int  `json:"min_task_member"`
	Held          bool `json:"held"`
}

// PartitionPlan is the hosts of one control function.
type PartitionPlan struct {
	Function string   `json:"function"`
	Hosts    []string `json:"hosts"`
}

// PartitionChange is what a change of functions moves.
type PartitionChange struct {
	Hosts []string `json:"hosts"`
	Share float64  `json:"share"`
}

// FunctionCount is how many of a control function are needed.
type FunctionCount struct {
	Function string  `json:"function"`
	Count    int     `json:"count"`
	Load     float64 `json:"load"` // of each, of its maximum
}

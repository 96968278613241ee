// A reader like the controllers of a cluster: an informer of client-go, which prints each event.
//
// Each event is a line of JSON: an object that was added, updated or deleted, with its version and a hash, and `synced`
// after the whole first list. The informer's state is the sum of its lines; tests compare it with the API server's state,
// which `-once` prints in the same format. `-change` makes the changes (changes.go).
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	slices   = "discovery.k8s.io/v1/endpointslices"
	services = "v1/services"
)

// A line of this program.
type said struct {
	Event     string `json:"event"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	Version   string `json:"version,omitempty"`
	Hash      string `json:"hash,omitempty"`
}

var (
	lines sync.Mutex
	out   = json.NewEncoder(os.Stdout)
)

func say(line said) {
	lines.Lock()
	defer lines.Unlock()
	must(out.Encode(line))
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "informer:", err)
		os.Exit(1)
	}
}

// Description of an object in a line. The hash is over its JSON with sorted keys, without the fields that readers never
// compare.
func event(what string, object any) said {
	if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = gone.Obj
	}
	about, err := meta.Accessor(object)
	must(err)
	text, err := json.Marshal(object)
	must(err)
	var fields map[string]any
	must(json.Unmarshal(text, &fields))
	// Whether typed clients have the first two fields depends on how they read the object.
	delete(fields, "kind")
	delete(fields, "apiVersion")
	if metadata, ok := fields["metadata"].(map[string]any); ok {
		delete(metadata, "managedFields")
	}
	text, err = json.Marshal(fields)
	must(err)
	hash := sha256.Sum256(text)
	return said{what, about.GetNamespace(), about.GetName(), about.GetResourceVersion(), hex.EncodeToString(hash[:])}
}

func follow(client kubernetes.Interface, resource, selector string) {
	narrow := func(options *metav1.ListOptions) { options.LabelSelector = selector }
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(narrow))
	generic, err := factory.ForResource(kind(resource))
	must(err)
	reader := generic.Informer()
	told, err := reader.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { say(event("added", object)) },
		UpdateFunc: func(_, object any) { say(event("updated", object)) },
		DeleteFunc: func(object any) { say(event("deleted", object)) },
	})
	must(err)
	never := make(chan struct{})
	factory.Start(never)
	// By then the handlers have got the whole first list.
	cache.WaitForCacheSync(never, told.HasSynced)
	say(said{Event: "synced"})
	<-never
}

// Prints all objects, from a list that requests the newest state.
func once(client kubernetes.Interface, resource, selector string) {
	options := metav1.ListOptions{LabelSelector: selector}
	var list runtime.Object
	var err error
	if resource == services {
		list, err = client.CoreV1().Services("").List(context.Background(), options)
	} else {
		list, err = client.DiscoveryV1().EndpointSlices("").List(context.Background(), options)
	}
	must(err)
	must(meta.EachListItem(list, func(object runtime.Object) error {
		say(event("added", object))
		return nil
	}))
	say(said{Event: "synced"})
}

func main() {
	server := flag.String("server", "", "where to read, http://HOST:PORT")
	kubeconfig := flag.String("kubeconfig", "", "or a kubeconfig that says so")
	protobuf := flag.Bool("protobuf", false, "read protobuf, not JSON")
	resource := flag.String("resource", slices, "what to read: "+slices+" or "+services)
	selector := flag.String("selector", "", "labels of what to read")
	list := flag.Bool("once", false, "print what there is, and end")
	changes := flag.Int("change", 0, "make so many changes, and end")
	seed := flag.Uint64("seed", 1, "which changes")
	flag.Parse()

	config, err := clientcmd.BuildConfigFromFlags(*server, *kubeconfig)
	must(err)
	config.ContentConfig = rest.ContentConfig{ContentType: runtime.ContentTypeJSON}
	if *protobuf {
		config.ContentType = runtime.ContentTypeProtobuf
		config.AcceptContentTypes = runtime.ContentTypeProtobuf
	}
	// The client itself does not limit the rate of requests here.
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	must(err)
	switch {
	case *changes > 0:
		change(client, *changes, *seed)
	case *list:
		once(client, *resource, *selector)
	default:
		follow(client, *resource, *selector)
	}
}

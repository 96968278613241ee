package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
)

const (
	// All objects that this program changes, and no others, have this label.
	changed = "causeway.io/changed"
	// So few names that each object is created, changed and deleted many times.
	names = 60
)

func kind(resource string) schema.GroupVersionResource {
	if resource == services {
		return corev1.SchemeGroupVersion.WithResource("services")
	}
	return discoveryv1.SchemeGroupVersion.WithResource("endpointslices")
}

// Creates, changes and deletes EndpointSlices and Services, three of the first for one of the second.
func change(client kubernetes.Interface, count int, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 9))
	options := metav1.ListOptions{LabelSelector: changed}
	known := map[string]bool{}
	all, err := client.DiscoveryV1().EndpointSlices("").List(context.Background(), options)
	must(err)
	for _, slice := range all.Items {
		known["slice/"+slice.Namespace+"/"+slice.Name] = true
	}
	listeners, err := client.CoreV1().Services("").List(context.Background(), options)
	must(err)
	for _, service := range listeners.Items {
		known["service/"+service.Namespace+"/"+service.Name] = true
	}
	for number := 0; number < count; number++ {
		namespace := []string{"a", "b"}[random.IntN(2)]
		name := fmt.Sprintf("changed-%d", random.IntN(names/2))
		what, one := "slice/", func(there, gone bool) error { return slice(client, random, namespace, name, there, gone) }
		if number%4 == 3 {
			what, one = "service/", func(there, gone bool) error { return service(client, random, namespace, name, there, gone) }
		}
		key := what + namespace + "/" + name
		gone := known[key] && random.IntN(4) == 0
		must(one(known[key], gone))
		known[key] = !gone
	}
}

func about(namespace, name string, random *rand.Rand) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace:   namespace,
		Name:        name,
		Labels:      map[string]string{changed: "true", "tier": fmt.Sprint(random.IntN(3))},
		Annotations: map[string]string{"causeway.io/number": fmt.Sprint(random.Uint64())},
	}
}

func slice(client kubernetes.Interface, random *rand.Rand, namespace, name string, there, gone bool) error {
	slices := client.DiscoveryV1().EndpointSlices(namespace)
	if gone {
		return slices.Delete(context.Background(), name, metav1.DeleteOptions{})
	}
	port, protocol, label := int32(1+random.IntN(65535)), corev1.ProtocolTCP, "web"
	object := &discoveryv1.EndpointSlice{
		ObjectMeta:  about(namespace, name, random),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &label, Port: &port, Protocol: &protocol}},
	}
	for number := range random.IntN(4) {
		ready, zone := random.IntN(2) == 0, fmt.Sprintf("zone-%d", number)
		object.Endpoints = append(object.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 200+number, random.IntN(256), random.IntN(256))},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			Zone:       &zone,
		})
	}
	var err error
	if there {
		_, err = slices.Update(context.Background(), object, metav1.UpdateOptions{})
	} else {
		_, err = slices.Create(context.Background(), object, metav1.CreateOptions{})
	}
	return err
}

func service(client kubernetes.Interface, random *rand.Rand, namespace, name string, there, gone bool) error {
	services := client.CoreV1().Services(namespace)
	if gone {
		return services.Delete(context.Background(), name, metav1.DeleteOptions{})
	}
	object := &corev1.Service{
		ObjectMeta: about(namespace, name, random),
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "web", Port: int32(1 + random.IntN(65535))}}},
	}
	if !there {
		_, err := services.Create(context.Background(), object, metav1.CreateOptions{})
		return err
	}
	before, err := services.Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	before.Labels, before.Annotations, before.Spec.Ports = object.Labels, object.Annotations, object.Spec.Ports
	_, err = services.Update(context.Background(), before, metav1.UpdateOptions{})
	return err
}

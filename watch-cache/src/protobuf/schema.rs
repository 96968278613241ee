//! The fields of each kind that has a protobuf encoding here: JSON name, number and type.
//!
//! Taken from the `generated.proto` files of k8s.io/api and k8s.io/apimachinery, each message in the order of its numbers, in
//! which Kubernetes writes them. In these files numbers never change, and fields are only added. Clients that read protobuf
//! do not receive a field that is missing here, so a test compares the tables with those files.

#[cfg(test)]
mod tests;

use Kind::{Bytes, Flag, Int, IntOrText, Json, Map, Message, Quantity, Repeated, Text, Time};

const OBJECT_META: &[Field] = &[
    Field("name", 1, Text),
    Field("generateName", 2, Text),
    Field("namespace", 3, Text),
    Field("selfLink", 4, Text),
    Field("uid", 5, Text),
    Field("resourceVersion", 6, Text),
    Field("generation", 7, Int),
    Field("creationTimestamp", 8, Time),
    Field("deletionTimestamp", 9, Time),
    Field("deletionGracePeriodSeconds", 10, Int),
    Field("labels", 11, STRING_MAP),
    Field("annotations", 12, STRING_MAP),
    Field("ownerReferences", 13, Repeated(&Message(OWNER_REFERENCE))),
    Field("finalizers", 14, STRING_LIST),
    Field("managedFields", 17, Repeated(&Message(MANAGED_FIELDS))),
];
const OWNER_REFERENCE: &[Field] = &[
    Field("kind", 1, Text),
    Field("name", 3, Text),
    Field("uid", 4, Text),
    Field("apiVersion", 5, Text),
    Field("controller", 6, Flag),
    Field("blockOwnerDeletion", 7, Flag),
];
const MANAGED_FIELDS: &[Field] = &[
    Field("manager", 1, Text),
    Field("operation", 2, Text),
    Field("apiVersion", 3, Text),
    Field("time", 4, Time),
    Field("fieldsType", 6, Text),
    Field("fieldsV1", 7, Json),
    Field("subresource", 8, Text),
];
const CONDITION: &[Field] = &[
    Field("type", 1, Text),
    Field("status", 2, Text),
    Field("observedGeneration", 3, Int),
    Field("lastTransitionTime", 4, Time),
    Field("reason", 5, Text),
    Field("message", 6, Text),
];
const OBJECT_REFERENCE: &[Field] = &[
    Field("kind", 1, Text),
    Field("namespace", 2, Text),
    Field("name", 3, Text),
    Field("uid", 4, Text),
    Field("apiVersion", 5, Text),
    Field("resourceVersion", 6, Text),
    Field("fieldPath", 7, Text),
];
const STATUS: &[Field] = &[
    Field("metadata", 1, Message(LIST_META)),
    Field("status", 2, Text),
    Field("message", 3, Text),
    Field("reason", 4, Text),
    Field("details", 5, Message(STATUS_DETAILS)),
    Field("code", 6, Int),
];
const LIST_META: &[Field] = &[
    Field("selfLink", 1, Text),
    Field("resourceVersion", 2, Text),
    Field("continue", 3, Text),
    Field("remainingItemCount", 4, Int),
    Field("shardInfo", 5, Message(&[Field("selector", 1, Text)])),
];
const STATUS_DETAILS: &[Field] = &[
    Field("name", 1, Text),
    Field("group", 2, Text),
    Field("kind", 3, Text),
    Field(
        "causes",
        4,
        Repeated(&Message(&[
            Field("reason", 1, Text),
            Field("message", 2, Text),
            Field("field", 3, Text),
        ])),
    ),
    Field("retryAfterSeconds", 5, Int),
    Field("uid", 6, Text),
];

/// A field of a message: its name in JSON, its number, its type.
pub(super) struct Field(pub(super) &'static str, pub(super) u32, pub(super) Kind);

/// Type of a field.
pub(super) enum Kind {
    Text,
    Int,
    Flag,
    /// Base64 in JSON.
    Bytes,
    /// RFC 3339 in JSON, a message of seconds and nanoseconds in protobuf.
    Time,
    /// A message that contains the text of a quantity.
    Quantity,
    /// A number or a text in JSON; a message with a type tag in protobuf.
    IntOrText,
    /// Unchanged JSON, as the bytes of a message.
    Json,
    Message(&'static [Field]),
    Repeated(&'static Kind),
    Map(&'static Kind),
}

/// Returns the fields of a kind, or `None` if it has no schema here.
pub(super) fn fields_of_kind(api_version: &str, kind: &str) -> Option<&'static [Field]> {
    KINDS
        .iter()
        .find(|known| known.0 == api_version && known.1 == kind)
        .map(|known| known.2)
}

/// Kinds with a schema: apiVersion, kind and fields.
const KINDS: &[(&str, &str, &[Field])] = &[
    ("discovery.k8s.io/v1", "EndpointSlice", ENDPOINT_SLICE),
    ("v1", "Endpoints", ENDPOINTS),
    ("v1", "Service", SERVICE),
    ("v1", "Namespace", NAMESPACE),
    ("v1", "Node", NODE),
    ("v1", "ConfigMap", CONFIG_MAP),
    ("networking.k8s.io/v1", "ServiceCIDR", SERVICE_CIDR),
    ("meta.k8s.io/v1", "PartialObjectMetadata", &[METADATA]),
    ("v1", "Status", STATUS),
];

const STRING_LIST: Kind = Repeated(&Text);
const STRING_MAP: Kind = Map(&Text);
const QUANTITY_MAP: Kind = Map(&Quantity);
const METADATA: Field = Field("metadata", 1, Message(OBJECT_META));
const CONDITIONS: Kind = Repeated(&Message(CONDITION));

const ENDPOINT_SLICE: &[Field] = &[
    METADATA,
    Field("endpoints", 2, Repeated(&Message(ENDPOINT))),
    Field("ports", 3, Repeated(&Message(ENDPOINT_SLICE_PORT))),
    Field("addressType", 4, Text),
];

const ENDPOINT: &[Field] = &[
    Field("addresses", 1, STRING_LIST),
    Field(
        "conditions",
        2,
        Message(&[
            Field("ready", 1, Flag),
            Field("serving", 2, Flag),
            Field("terminating", 3, Flag),
        ]),
    ),
    Field("hostname", 3, Text),
    Field("targetRef", 4, Message(OBJECT_REFERENCE)),
    Field("deprecatedTopology", 5, STRING_MAP),
    Field("nodeName", 6, Text),
    Field("zone", 7, Text),
    Field(
        "hints",
        8,
        Message(&[
            Field("forZones", 1, Repeated(&Message(&[Field("name", 1, Text)]))),
            Field("forNodes", 2, Repeated(&Message(&[Field("name", 1, Text)]))),
        ]),
    ),
];

/// Port of an `EndpointSlice`. It differs from the port of Endpoints in its field numbers.
const ENDPOINT_SLICE_PORT: &[Field] = &[
    Field("name", 1, Text),
    Field("protocol", 2, Text),
    Field("port", 3, Int),
    Field("appProtocol", 4, Text),
];

const ENDPOINTS: &[Field] = &[
    METADATA,
    Field(
        "subsets",
        2,
        Repeated(&Message(&[
            Field("addresses", 1, Repeated(&Message(ENDPOINT_ADDRESS))),
            Field("notReadyAddresses", 2, Repeated(&Message(ENDPOINT_ADDRESS))),
            Field("ports", 3, Repeated(&Message(ENDPOINT_PORT))),
        ])),
    ),
];

const ENDPOINT_ADDRESS: &[Field] = &[
    Field("ip", 1, Text),
    Field("targetRef", 2, Message(OBJECT_REFERENCE)),
    Field("hostname", 3, Text),
    Field("nodeName", 4, Text),
];

const ENDPOINT_PORT: &[Field] = &[
    Field("name", 1, Text),
    Field("port", 2, Int),
    Field("protocol", 3, Text),
    Field("appProtocol", 4, Text),
];

const SERVICE: &[Field] = &[
    METADATA,
    Field("spec", 2, Message(SERVICE_SPEC)),
    Field(
        "status",
        3,
        Message(&[
            Field(
                "loadBalancer",
                1,
                Message(&[Field("ingress", 1, Repeated(&Message(INGRESS)))]),
            ),
            Field("conditions", 2, CONDITIONS),
        ]),
    ),
];

const SERVICE_SPEC: &[Field] = &[
    Field("ports", 1, Repeated(&Message(SERVICE_PORT))),
    Field("selector", 2, STRING_MAP),
    Field("clusterIP", 3, Text),
    Field("type", 4, Text),
    Field("externalIPs", 5, STRING_LIST),
    Field("sessionAffinity", 7, Text),
    Field("loadBalancerIP", 8, Text),
    Field("loadBalancerSourceRanges", 9, STRING_LIST),
    Field("externalName", 10, Text),
    Field("externalTrafficPolicy", 11, Text),
    Field("healthCheckNodePort", 12, Int),
    Field("publishNotReadyAddresses", 13, Flag),
    Field(
        "sessionAffinityConfig",
        14,
        Message(&[Field(
            "clientIP",
            1,
            Message(&[Field("timeoutSeconds", 1, Int)]),
        )]),
    ),
    Field("ipFamilyPolicy", 17, Text),
    Field("clusterIPs", 18, STRING_LIST),
    Field("ipFamilies", 19, STRING_LIST),
    Field("allocateLoadBalancerNodePorts", 20, Flag),
    Field("loadBalancerClass", 21, Text),
    Field("internalTrafficPolicy", 22, Text),
    Field("trafficDistribution", 23, Text),
];

const SERVICE_PORT: &[Field] = &[
    Field("name", 1, Text),
    Field("protocol", 2, Text),
    Field("port", 3, Int),
    Field("targetPort", 4, IntOrText),
    Field("nodePort", 5, Int),
    Field("appProtocol", 6, Text),
];

const INGRESS: &[Field] = &[
    Field("ip", 1, Text),
    Field("hostname", 2, Text),
    Field("ipMode", 3, Text),
    Field(
        "ports",
        4,
        Repeated(&Message(&[
            Field("port", 1, Int),
            Field("protocol", 2, Text),
            Field("error", 3, Text),
        ])),
    ),
];

const NAMESPACE: &[Field] = &[
    METADATA,
    Field("spec", 2, Message(&[Field("finalizers", 1, STRING_LIST)])),
    Field(
        "status",
        3,
        Message(&[
            Field("phase", 1, Text),
            // The fields have the same numbers as in all conditions.
            Field("conditions", 2, CONDITIONS),
        ]),
    ),
];

const NODE: &[Field] = &[
    METADATA,
    Field("spec", 2, Message(NODE_SPEC)),
    Field("status", 3, Message(NODE_STATUS)),
];

const NODE_SPEC: &[Field] = &[
    Field("podCIDR", 1, Text),
    Field("externalID", 2, Text),
    Field("providerID", 3, Text),
    Field("unschedulable", 4, Flag),
    Field(
        "taints",
        5,
        Repeated(&Message(&[
            Field("key", 1, Text),
            Field("value", 2, Text),
            Field("effect", 3, Text),
            Field("timeAdded", 4, Time),
        ])),
    ),
    Field("configSource", 6, Message(NODE_CONFIG_SOURCE)),
    Field("podCIDRs", 7, STRING_LIST),
    Field(
        "podPreemptionPolicy",
        8,
        Message(&[Field("disableResizePreemption", 1, STRING_LIST)]),
    ),
];

const NODE_CONFIG_SOURCE: &[Field] = &[Field(
    "configMap",
    2,
    Message(&[
        Field("namespace", 1, Text),
        Field("name", 2, Text),
        Field("uid", 3, Text),
        Field("resourceVersion", 4, Text),
        Field("kubeletConfigKey", 5, Text),
    ]),
)];

const NODE_STATUS: &[Field] = &[
    Field("capacity", 1, QUANTITY_MAP),
    Field("allocatable", 2, QUANTITY_MAP),
    Field("phase", 3, Text),
    Field("conditions", 4, Repeated(&Message(NODE_CONDITION))),
    Field(
        "addresses",
        5,
        Repeated(&Message(&[
            Field("type", 1, Text),
            Field("address", 2, Text),
        ])),
    ),
    Field(
        "daemonEndpoints",
        6,
        // The only name in this schema that begins with a capital letter.
        Message(&[Field(
            "kubeletEndpoint",
            1,
            Message(&[Field("Port", 1, Int)]),
        )]),
    ),
    Field("nodeInfo", 7, Message(NODE_SYSTEM_INFO)),
    Field(
        "images",
        8,
        Repeated(&Message(&[
            Field("names", 1, STRING_LIST),
            Field("sizeBytes", 2, Int),
        ])),
    ),
    Field("volumesInUse", 9, STRING_LIST),
    Field(
        "volumesAttached",
        10,
        Repeated(&Message(&[
            Field("name", 1, Text),
            Field("devicePath", 2, Text),
        ])),
    ),
    Field("config", 11, Message(NODE_CONFIG)),
    Field("runtimeHandlers", 12, Repeated(&Message(RUNTIME_HANDLER))),
    Field(
        "features",
        13,
        Message(&[Field("supplementalGroupsPolicy", 1, Flag)]),
    ),
    Field("declaredFeatures", 14, STRING_LIST),
];

const NODE_CONDITION: &[Field] = &[
    Field("type", 1, Text),
    Field("status", 2, Text),
    Field("lastHeartbeatTime", 3, Time),
    Field("lastTransitionTime", 4, Time),
    Field("reason", 5, Text),
    Field("message", 6, Text),
];

const NODE_SYSTEM_INFO: &[Field] = &[
    Field("machineID", 1, Text),
    Field("systemUUID", 2, Text),
    Field("bootID", 3, Text),
    Field("kernelVersion", 4, Text),
    Field("osImage", 5, Text),
    Field("containerRuntimeVersion", 6, Text),
    Field("kubeletVersion", 7, Text),
    Field("kubeProxyVersion", 8, Text),
    Field("operatingSystem", 9, Text),
    Field("architecture", 10, Text),
    Field("swap", 11, Message(&[Field("capacity", 1, Int)])),
    Field("runningInUserNamespace", 12, Flag),
];

const NODE_CONFIG: &[Field] = &[
    Field("assigned", 1, Message(NODE_CONFIG_SOURCE)),
    Field("active", 2, Message(NODE_CONFIG_SOURCE)),
    Field("lastKnownGood", 3, Message(NODE_CONFIG_SOURCE)),
    Field("error", 4, Text),
];

const RUNTIME_HANDLER: &[Field] = &[
    Field("name", 1, Text),
    Field(
        "features",
        2,
        Message(&[
            Field("recursiveReadOnlyMounts", 1, Flag),
            Field("userNamespaces", 2, Flag),
        ]),
    ),
];

const CONFIG_MAP: &[Field] = &[
    METADATA,
    Field("data", 2, STRING_MAP),
    Field("binaryData", 3, Map(&Bytes)),
    Field("immutable", 4, Flag),
];

const SERVICE_CIDR: &[Field] = &[
    METADATA,
    Field("spec", 2, Message(&[Field("cidrs", 1, STRING_LIST)])),
    Field("status", 3, Message(&[Field("conditions", 1, CONDITIONS)])),
];

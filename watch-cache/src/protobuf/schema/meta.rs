//! Fields of objects of every kind: metadata, conditions, references; and `Status`, a response that is not an object.

use super::Kind::{Flag, Int, Json, Message, Repeated, Text, Time};
use super::{Field, STRING_LIST, STRING_MAP};

pub(super) const OBJECT_META: &[Field] = &[
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

pub(super) const CONDITION: &[Field] = &[
    Field("type", 1, Text),
    Field("status", 2, Text),
    Field("observedGeneration", 3, Int),
    Field("lastTransitionTime", 4, Time),
    Field("reason", 5, Text),
    Field("message", 6, Text),
];

pub(super) const OBJECT_REFERENCE: &[Field] = &[
    Field("kind", 1, Text),
    Field("namespace", 2, Text),
    Field("name", 3, Text),
    Field("uid", 4, Text),
    Field("apiVersion", 5, Text),
    Field("resourceVersion", 6, Text),
    Field("fieldPath", 7, Text),
];

pub(super) const STATUS: &[Field] = &[
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

//! Parts that several fuzz targets share.

pub mod http2;

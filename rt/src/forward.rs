//! Methods of `AsyncRead` and `AsyncWrite` that a wrapper forwards to its inner transport.

/// Implements methods of `AsyncRead` or `AsyncWrite` by those of a field. Use it inside the `impl`: `forward!(io: poll_flush,
/// poll_shutdown);`
#[macro_export]
macro_rules! forward {
    ($field:tt: $($method:ident),+) => {
        $($crate::forward!(@$method $field);)+
    };
    (@poll_read $field:tt) => {
        fn poll_read(
            self: ::std::pin::Pin<&mut Self>,
            cx: &mut ::std::task::Context<'_>,
            buf: &mut ::tokio::io::ReadBuf<'_>,
        ) -> ::std::task::Poll<::std::io::Result<()>> {
            ::std::pin::Pin::new(&mut self.get_mut().$field).poll_read(cx, buf)
        }
    };
    (@poll_write $field:tt) => {
        fn poll_write(
            self: ::std::pin::Pin<&mut Self>,
            cx: &mut ::std::task::Context<'_>,
            buf: &[u8],
        ) -> ::std::task::Poll<::std::io::Result<usize>> {
            ::std::pin::Pin::new(&mut self.get_mut().$field).poll_write(cx, buf)
        }
    };
    (@poll_write_vectored $field:tt) => {
        fn poll_write_vectored(
            self: ::std::pin::Pin<&mut Self>,
            cx: &mut ::std::task::Context<'_>,
            bufs: &[::std::io::IoSlice<'_>],
        ) -> ::std::task::Poll<::std::io::Result<usize>> {
            ::std::pin::Pin::new(&mut self.get_mut().$field).poll_write_vectored(cx, bufs)
        }
    };
    (@is_write_vectored $field:tt) => {
        fn is_write_vectored(&self) -> bool {
            self.$field.is_write_vectored()
        }
    };
    (@$poll:ident $field:tt) => {
        fn $poll(
            self: ::std::pin::Pin<&mut Self>,
            cx: &mut ::std::task::Context<'_>,
        ) -> ::std::task::Poll<::std::io::Result<()>> {
            ::std::pin::Pin::new(&mut self.get_mut().$field).$poll(cx)
        }
    };
}

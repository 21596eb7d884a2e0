//go:build azure

package archive

import (
	"errors"
	"net/http"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	_ "gocloud.dev/blob/azureblob" // azblob://
)

func init() {
	denies = append(denies, func(err error) bool { // AuthorizationPermissionMismatch, for one
		var e *azcore.ResponseError
		return errors.As(err, &e) && e.StatusCode == http.StatusForbidden
	})
}
